"""An output of a cell that is replaced later."""

from __future__ import annotations

import dataclasses
import uuid
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from typing_extensions import Self

    from notebook_launcher.kernel.display.sink import Sink


@dataclasses.dataclass(frozen=True, slots=True)
class ReplacedOutput:
    """An output of a cell that is replaced later, which a page finds by its identifier."""

    sink: Sink
    """The cell."""
    display_id: str
    """Identifier of the output, as Jupyter's messages carry it."""

    @classmethod
    def show(cls, sink: Sink, bundle: Mapping[str, Any]) -> Self:
        """Show a bundle in a cell, and return its output."""
        output = cls(sink, uuid.uuid4().hex)
        sink.display(bundle, transient={"display_id": output.display_id})
        return output

    def replace(self, bundle: Mapping[str, Any]) -> None:
        """Show another bundle in its place."""
        self.sink.display(bundle, transient={"display_id": self.display_id}, update=True)
