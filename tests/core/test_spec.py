"""The text form of policies: there and back, and errors of one line with the value and what is allowed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core import spec
from paceline.core.messages import Members
from paceline.core.policy import Policy
from paceline.core.spec import Spec, parameter
from paceline.errors import ConfigError
from paceline.policies import ASP, BSP, CATALOGUE, PSSP, SSP, Backup, parse

KNOWN = ", ".join(CATALOGUE)
repeatable = settings(max_examples=200, deadline=None, derandomize=True, database=None)


@dataclass(frozen=True)
class Sample(Spec):
    """One parameter of every type a text form can have."""

    name: ClassVar[str] = "sample"
    kind: ClassVar[str] = "sample"

    whole: int = parameter(1, low=-5, high=1_000_000, doc="a whole number")
    share: float = parameter(0.5, low=0, high=1, doc="a share")
    speed: float = parameter(1.0, doc="any number")
    sure: bool = parameter(False, doc="yes or no")
    mode: str = parameter("soft", doc="a word")
    limit: int | None = parameter(None, low=1, doc="a whole number or none")
    row: tuple[float, ...] = parameter((1.0,), low=0, doc="a list")


class TestThereAndBack:
    @pytest.mark.parametrize("name", CATALOGUE)
    def test_every_policy_by_its_name(self, name: str) -> None:
        policy = parse(name)
        assert policy == CATALOGUE[name]()
        assert parse(str(policy)) == policy
        assert policy.name == name

    @repeatable
    @given(
        st.one_of(
            st.just(BSP()),
            st.just(ASP()),
            st.integers(0, 10**9).map(lambda s: SSP(staleness=s)),
            st.integers(0, 10**9).map(lambda b: Backup(extra=b)),
        )
    )
    def test_every_policy(self, policy: Policy) -> None:
        text = str(policy)
        assert parse(text) == policy
        assert str(parse(text)) == text
        assert hash(parse(text)) == hash(policy)

    @repeatable
    @given(
        st.builds(
            Sample,
            whole=st.integers(-5, 1_000_000),
            share=st.floats(0, 1),
            speed=st.floats(allow_nan=False, allow_infinity=False),
            sure=st.booleans(),
            mode=st.sampled_from(["soft", "lazy"]),
            limit=st.none() | st.integers(1, 100),
            row=st.lists(st.floats(0, 1e9), min_size=1, max_size=4).map(tuple),
        )
    )
    def test_every_type_of_parameter(self, sample: Sample) -> None:
        assert spec.parse(str(sample), {"sample": Sample}, "sample") == sample

    @pytest.mark.parametrize(
        ("text", "policy"),
        [
            ("ssp", SSP(staleness=3)),
            ("ssp:staleness=0", SSP(staleness=0)),
            ("ssp(staleness=2)", SSP(staleness=2)),
            ("  ssp : staleness = 2 ", SSP(staleness=2)),
            ("bsp()", BSP()),
            ("backup:extra=4", Backup(extra=4)),
            ("pssp:staleness=3,probability=0.25", PSSP(staleness=3, c=0.25)),
        ],
    )
    def test_spellings(self, text: str, policy: Policy) -> None:
        assert parse(text) == policy

    def test_a_fraction_is_a_number(self) -> None:
        made = spec.parse("sample:share=1/8,row=1/2:3", {"sample": Sample}, "sample")
        assert (made.share, made.row) == (0.125, (0.5, 3.0))

    def test_parentheses_nest(self) -> None:
        assert spec.split("specsync:base=ssp(staleness=3,mode=lazy),rate=2") == (
            "specsync",
            {"base": "ssp(staleness=3,mode=lazy)", "rate": "2"},
        )

    def test_a_policy_is_its_own_text_form(self) -> None:
        policy = SSP(staleness=7)
        assert parse(policy) is policy

    def test_equal_parameters_make_equal_policies(self) -> None:
        assert SSP(staleness=2) == SSP(staleness=2) != SSP(staleness=3)
        assert len({SSP(staleness=2), parse("ssp:staleness=2"), BSP()}) == 2


class TestErrors:
    @pytest.mark.parametrize(
        ("text", "line"),
        [
            ("ssp:staleness=-1", "ssp:staleness=-1 is out of range: 0 or more"),
            ("backup:extra=-3", "backup:extra=-3 is out of range: 0 or more"),
            ("ssp:staleness=two", "ssp:staleness=two is not a whole number (0 or more)"),
            ("ssp:staleness=1.5", "ssp:staleness=1.5 is not a whole number (0 or more)"),
            ("ssp:slack=1", "ssp has no parameter 'slack' (it has: staleness, lazy, scale, staleness_weighted)"),
            ("asp:scale=half", "asp:scale=half is not one of workers, none"),
            ("bsp:scale=none", "bsp has no parameter 'scale' (it has: none)"),
            ("specsync:scale=none", "specsync has no parameter 'scale' (it has: base, abort_time, abort_rate)"),
            ("adpsgd:scale=none", "adpsgd has no parameter 'scale' (it has: graph, machines)"),
            ("bsp:staleness=1", "bsp has no parameter 'staleness' (it has: none)"),
            (
                "spp:staleness=1",
                f"unknown policy 'spp', did you mean 'ssp'? (known: {KNOWN})",
            ),
            ("xyz", f"unknown policy 'xyz' (known: {KNOWN})"),
            ("ssp:staleness", "'staleness' in 'ssp:staleness' is not KEY=VALUE"),
            ("ssp:staleness=", "'staleness=' in 'ssp:staleness=' is not KEY=VALUE"),
            ("ssp:staleness=1,staleness=2", "'staleness' is given twice in 'ssp:staleness=1,staleness=2'"),
            ("", "'' has no name: write NAME or NAME:KEY=VALUE,KEY=VALUE"),
            (":staleness=1", "':staleness=1' has no name: write NAME or NAME:KEY=VALUE,KEY=VALUE"),
        ],
    )
    def test_one_line_with_the_value_and_what_is_allowed(self, text: str, line: str) -> None:
        with pytest.raises(ConfigError) as caught:
            parse(text)
        assert str(caught.value) == line

    @pytest.mark.parametrize(
        ("text", "line"),
        [
            ("sample:share=1.5", "sample:share=1.5 is out of range: from 0 to 1"),
            ("sample:share=nan", "sample:share=nan is out of range: from 0 to 1"),
            ("sample:share=1/0", "sample:share=1/0 is not a number (from 0 to 1)"),
            ("sample:whole=1000001", "sample:whole=1000001 is out of range: from -5 to 1000000"),
            ("sample:sure=perhaps", "sample:sure=perhaps is not true or false"),
            ("sample:limit=0", "sample:limit=0 is out of range: 1 or more"),
            ("sample:row=1:-2:3", "sample:row=-2 is out of range: 0 or more"),
        ],
    )
    def test_of_every_type(self, text: str, line: str) -> None:
        with pytest.raises(ConfigError) as caught:
            spec.parse(text, {"sample": Sample}, "sample")
        assert str(caught.value) == line

    def test_in_python_too(self) -> None:
        with pytest.raises(ConfigError, match="ssp:staleness=-1 is out of range: 0 or more"):
            SSP(staleness=-1)

    @pytest.mark.parametrize("value", [2.5, 2.0, True, "2", None])
    def test_a_whole_number_is_an_int(self, value: Any) -> None:
        """Nothing is rounded in silence, and `True` is a slip of the pen, not 1."""
        words = repr(value).lower() if isinstance(value, bool) else repr(value)
        words = words.removesuffix(".0")
        for cls, key in ((SSP, "staleness"), (Backup, "extra")):
            with pytest.raises(ConfigError) as caught:
                cls(**{key: value})
            assert str(caught.value) == f"{cls.name}:{key}={words} is not a whole number (0 or more)"

    def test_a_policy_that_cannot_run_with_so_few_workers(self) -> None:
        Backup(extra=2).validate(Members(3, 1))
        with pytest.raises(ConfigError) as caught:
            Backup(extra=3).validate(Members(3, 1))
        assert str(caught.value) == ("backup:extra=3 needs more than 3 workers: with 3, extra may be from 0 to 2")

    @repeatable
    @given(st.text(max_size=30))
    def test_whatever_is_typed_it_is_a_policy_or_one_line(self, text: str) -> None:
        assert_policy_or_one_line(text)

    @repeatable
    @given(st.sampled_from(["ssp", "backup", "bsp"]), st.text("=,:()x -1.e/_", max_size=12))
    def test_whatever_follows_a_known_name(self, name: str, text: str) -> None:
        assert_policy_or_one_line(f"{name}:{text}")
        assert_policy_or_one_line(f"{name}({text})")


def assert_policy_or_one_line(text: str) -> None:
    outcome: Policy | str
    try:
        outcome = parse(text)
    except ConfigError as error:
        outcome = str(error)
    if isinstance(outcome, Policy):
        assert parse(str(outcome)) == outcome
    else:
        assert len(outcome.splitlines()) == 1
