"""Settings of a run that can be changed while it goes on, with their last known values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_launcher.history.schema import RunSetting
from notebook_launcher.settings.changes import ACCELERATOR_SETTINGS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from notebook_launcher.messaging import messages

__all__ = ["LiveSettings"]


class LiveSettings:
    """The settings that the ranks of one run offer. The run's thread writes them, any thread may read them."""

    def __init__(self) -> None:
        self.of_accelerator: Mapping[str, float | None] = {}
        """By name: the settings of the Accelerator that carries changes out, empty until it made an update; or those of
        a trainer of another library that does so."""
        self.tunables: dict[str, float] = {}
        """By name: the settings that the function offers."""
        self.trainer: messages.TrainerMade | None = None
        """The trainer of another library that makes the updates; None: there is none."""

    def note_trainer(self, record: messages.TrainerMade) -> None:
        """Note a trainer of another library; the first one counts until one trains that takes requests."""
        if self.trainer is None or record.settings:
            self.trainer = record
        self.of_accelerator = record.settings or self.of_accelerator

    def take_reported(self, settings: Mapping[str, float | None]) -> None:
        """Take the Accelerator's settings from a record of phases."""
        self.of_accelerator = settings

    def offer(self, name: str, value: float) -> None:
        """Add a setting that the function offers, unless it is known."""
        self.tunables.setdefault(name, value)

    def note_change(self, record: messages.Changed) -> None:
        """Take the new values of a change, which is reported before the first record of phases that has them, too."""
        after = {name: new for name, (_, new) in record.values.items()}
        own = {name: new for name, new in after.items() if name in ACCELERATOR_SETTINGS}
        self.of_accelerator = {**self.of_accelerator, **own}
        self.tunables.update({name: new for name, new in after.items() if name in self.tunables and new is not None})

    def forget(self) -> None:
        """Forget what ranks of an earlier attempt offered."""
        self.of_accelerator, self.tunables, self.trainer = {}, {}, None

    def present(self) -> tuple[RunSetting, ...]:
        """Return all settings with their last known values."""
        own = [
            RunSetting(name=name, value=value, kind=ACCELERATOR_SETTINGS[name])
            for name, value in self.of_accelerator.items()
        ]
        offered = [
            RunSetting(
                name=name,
                value=value,
                kind="switch" if isinstance(value, bool) else "integer" if isinstance(value, int) else "number",
            )
            for name, value in dict(self.tunables).items()
        ]
        return (*own, *offered)
