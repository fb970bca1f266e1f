"""What a bundled workload is in the catalogue: a name, options with their ranges, and how it is made."""

from __future__ import annotations

from typing import ClassVar

from paceline.core.spec import Spec
from paceline.workloads.base import Workload


class WorkloadSpec(Spec):
    """The options of a bundled workload; its text form is what `--workload` takes: `char-transformer:width=256`."""

    kind: ClassVar[str] = "workload"

    def make(self) -> Workload:
        """Reads or makes the data. The workload is called as the text form is."""
        raise NotImplementedError
