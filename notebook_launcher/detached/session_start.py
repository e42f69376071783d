"""The start of a detached session: a kernel resolves the options, and starts a host that keeps the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from notebook_launcher.detached.attached_session import AttachedSession
from notebook_launcher.detached.host_start import detached_options, hand_over
from notebook_launcher.detached.requests import SessionOrder
from notebook_launcher.detached.session_folders import check_name_is_free
from notebook_launcher.history import run_folders
from notebook_launcher.kernel.plan import make_plan

if TYPE_CHECKING:
    from notebook_launcher.config import LaunchConfig

__all__ = ["start_detached_session"]


def start_detached_session(config: LaunchConfig) -> AttachedSession:
    """Start ranks that outlive this kernel, and return the session.

    Raises:
        ConfigError: An option cannot work, or a session that lives has the name.
        ResourceError: The host or the ranks did not start.
    """
    setup, config = config.setup, detached_options(config)
    home = run_folders.find_home(config.runs_folder)
    assert home is not None
    check_name_is_free(home, config)
    plan = make_plan(config)
    order = SessionOrder(plan=plan, surroundings=plan.setup(many_calls=True))
    return AttachedSession(Path(hand_over(order).folder), setup=setup)
