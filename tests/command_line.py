"""fxprec's command line, run in this process."""

from __future__ import annotations

import pytest

from fxprec import cli


def exit_code(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main([str(a) for a in arguments])
    return int(ended.value.code or 0)
