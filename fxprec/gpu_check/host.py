"""The process that items are forked from: ``python -m fxprec.gpu_check.host [MODULE ...]``.

It imports the named modules once. For each line on its standard input, a JSON object of `child.run`'s arguments, it
forks a process. It answers with the process's id and, when the process has ended, its exit code. For a GPU it imports
nothing: a process that has used CUDA cannot be forked.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import traceback
import warnings
from typing import Any


def main(modules: list[str]) -> None:
    """Import the modules, then fork a process for each line of standard input, until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what imports print must not be read as an answer
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own warnings at import
        for name in modules:
            importlib.import_module(name)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _child(json.loads(line))
        answers.write(f"{pid}\n")
        _, status = os.waitpid(pid, 0)
        answers.write(f"{os.waitstatus_to_exitcode(status)}\n")


def _child(arguments: dict[str, Any]) -> None:
    """Run one item in its own session, so that everything it starts can be ended with it; never return."""
    os.setsid()
    code = 1
    try:
        log = os.open(arguments.pop("log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for stream in (1, 2):
            os.dup2(log, stream)
        faulthandler.enable()
        faulthandler.dump_traceback_later(max(0.9 * arguments["seconds"], arguments["seconds"] - 2))  # where it hangs
        from fxprec.gpu_check import child

        child.run(**arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
