"""The record of local steps, and its texts beside those of policies."""

from __future__ import annotations

import pytest

from paceline.core.local_steps import OUTER, LocalSteps, make
from paceline.errors import ConfigError
from paceline.policies import SSP
from paceline.policies.with_local_steps import parse, split, text_of
from paceline.tensors.outer_optimizers import parse_outer

AUTO = LocalSteps("auto", at_least=16, at_most=64)

READ = {
    "bsp": ("bsp", None),
    "bsp:local_steps=32": ("bsp", LocalSteps("steps", 32)),
    "bsp(local_steps=32)": ("bsp", LocalSteps("steps", 32)),
    "ssp:staleness=3, every_s=30": ("ssp:staleness=3", LocalSteps("time", every_s=30.0)),
    "ssp:local_steps=auto,staleness=3": ("ssp:staleness=3", AUTO),
    "bsp:local_steps=auto(at_most=9,at_least=8)": ("bsp", LocalSteps("auto", at_least=8, at_most=9)),
    "bsp:local_steps=proportional": ("bsp", LocalSteps("proportional", at_least=1, at_most=64)),
    "asp:scale=none,local_steps=4,outer=nesterov(lr=0.5,momentum=0.8)": (
        "asp:scale=none",
        LocalSteps("steps", 4, outer="nesterov(lr=0.5,momentum=0.8)"),
    ),
    "./a+b@1,x.py:Mine:bound=2,local_steps=4": ("./a+b@1,x.py:Mine:bound=2", LocalSteps("steps", 4)),
    "./mine.py:Mine:local_steps=4": ("./mine.py:Mine", LocalSteps("steps", 4)),
    "waiting:base=ssp(staleness=3),local_steps=2": ("waiting:base=ssp(staleness=3)", LocalSteps("steps", 2)),
}


@pytest.mark.parametrize("text", READ)
def test_texts_are_taken_apart_and_put_together(text: str) -> None:
    policy, local = READ[text]
    assert split(text) == (policy, local)
    assert split(text_of(policy, local)) == (policy, local)


def test_local_steps_are_said_in_the_text_or_beside_it() -> None:
    assert parse("ssp:staleness=3", 32) == parse("ssp:staleness=3,local_steps=32") == (SSP(3), LocalSteps("steps", 32))
    assert parse(SSP(3), "auto") == (SSP(3), AUTO)
    assert parse("bsp:local_steps=2", outer="average").local == make(2, outer="average")
    assert text_of("bsp@0,asp@9", AUTO) == "bsp@0,asp@9 local_steps=auto"
    assert parse("bsp@0,asp@9", "auto").local == AUTO
    assert AUTO.outer == OUTER


REFUSED = {
    ("bsp:local_steps=0",): "local_steps=0 is out of range",
    ("bsp:local_steps=-3",): "local_steps=-3 is out of range",
    ("bsp:local_steps=many",): "local_steps=many is unknown",
    ("bsp:local_steps=steps",): "local_steps=steps is unknown",
    ("bsp:local_steps=auto(at_least=9,at_most=8)",): "at_least=9 is more than at_most=8",
    ("bsp:local_steps=auto(steps=9)",): "no parameter 'steps'",
    ("bsp:local_steps=auto(at_most=x)",): "at_most=x is not a whole number",
    ("bsp:local_steps=2,local_steps=3",): "given twice",
    ("bsp:local_steps=2,every_s=3",): "give one",
    ("bsp:every_s=nan",): "every_s=nan is out of range",
    ("bsp:every_s=0",): "every_s=0.0 is out of range",
    ("bsp:every_s=soon",): "every_s=soon is not a number",
    ("bsp:outer=average",): "outer=average is for local steps",
    ("bsp", None, None, "average"): "outer=average is for local steps",
    ("bsp:local_steps=2", 3): "say it once",
    ("bsp:local_steps=2,outer=average", None, None, "average"): "say it once",
    ("bsp", True): "local_steps=True is out of range",
    ("ssp:staleness=1+bsp:local_steps=3",): "none has local steps of its own",
    ("bsp@0,asp:local_steps=3@9",): "none has local steps of its own",
    ("specsync", 4): "specsync:base=asp cannot have local_steps=4",
    ("elastic", 4): "is bsp with local_steps=auto",
    ("scheduled", None, 2.0): "scheduled:base=bsp cannot have every_s=2",
    ("adpsgd", 4): "in the middle of a round",
}


@pytest.mark.parametrize("given", REFUSED)
def test_what_cannot_be_is_refused_in_one_line(given: tuple[object, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(*given)  # type: ignore[arg-type]
    assert REFUSED[given] in str(refused.value)
    assert "\n" not in str(refused.value)


def test_outer_optimizers() -> None:
    nesterov = parse_outer(OUTER)
    assert nesterov == parse_outer("nesterov") == parse_outer("nesterov:lr=0.7")
    assert (nesterov.name, nesterov.groups) == ("nesterov", ({"lr": 0.7, "momentum": 0.9},))
    assert parse_outer("average").groups[0]["lr"] == 1
    assert parse_outer("adam:lr=0.1").name == "adam"
    for text in (
        "average(lr=2)",
        "nesterov(momentum=2,lr=x)",
        "nothing",
        "sgd(lr=1,clip=1)",
        "sgd(lr=1,schedule=cosine)",
    ):
        with pytest.raises(ConfigError, match="outer="):
            parse_outer(text)
