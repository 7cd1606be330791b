"""The modules that load torch, records or pages: named here once, loaded when they are needed.

The plugin runs in every pytest of the environment, mostly in projects without gates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qgate.loading import LateModule

if TYPE_CHECKING:
    from qgate import device_errors as device_errors
    from qgate import devices as devices
    from qgate import formats as formats
    from qgate import testing as testing
    from qgate.gate.measuring import suite_needs as suite_needs
    from qgate.kernel_checks import updating as updating
    from qgate.plugin import dealing as dealing
    from qgate.plugin import html_columns as html_columns
    from qgate.plugin import records as records
    from qgate.plugin import sessions as sessions
    from qgate.plugin import shipped as shipped
    from qgate.plugin import summary as summary
    from qgate.sweeps import underflow as underflow
else:
    formats, testing = LateModule("qgate.formats"), LateModule("qgate.testing")
    suite_needs = LateModule("qgate.gate.measuring.suite_needs")
    dealing = LateModule("qgate.plugin.dealing")
    html_columns = LateModule("qgate.plugin.html_columns")
    records, sessions = LateModule("qgate.plugin.records"), LateModule("qgate.plugin.sessions")
    devices, updating = LateModule("qgate.devices"), LateModule("qgate.kernel_checks.updating")
    device_errors = LateModule("qgate.device_errors")
    shipped = LateModule("qgate.plugin.shipped")
    summary, underflow = LateModule("qgate.plugin.summary"), LateModule("qgate.sweeps.underflow")
