"""`doctor()`."""

from __future__ import annotations

import dataclasses

from notebook_launcher.diagnosis.diagnosis import Diagnosis
from notebook_launcher.diagnosis.graphics import look_at_gpus
from notebook_launcher.diagnosis.limits import look_at_limits
from notebook_launcher.diagnosis.network import look_at_names
from notebook_launcher.diagnosis.process import look_at_process
from notebook_launcher.diagnosis.software import look_at_software
from notebook_launcher.diagnosis.trial import try_launch
from notebook_launcher.kernel.calls.checks import check_not_in_rank
from notebook_launcher.wording.secret_text import redact

__all__ = ["doctor"]


def doctor(*, launch: bool = True) -> Diagnosis:
    """Look at this machine and this process as a launch meets them, and return each fact with what to type.

    A verdict stands only on something that was measured or tried: versions, the GPUs with their users, limits,
    look-ups of names, a fork of this process, and at the end a real launch of two ranks with reductions, data-loader
    workers and a stop. `notebook-launcher env` is the same in a terminal.

    Args:
        launch: False to leave out the launch, which takes some seconds.

    Returns:
        The findings: a table in a notebook, text elsewhere; true if there is no problem.

    Raises:
        CallOrderError: The call was made inside a rank.
    """
    check_not_in_rank("doctor")
    looks = [look_at_software, look_at_gpus, look_at_limits, look_at_names, look_at_process]
    if launch:
        looks.append(try_launch)
    found = (finding for look in looks for finding in look())
    return Diagnosis(tuple(dataclasses.replace(finding, fact=redact(finding.fact)) for finding in found))
