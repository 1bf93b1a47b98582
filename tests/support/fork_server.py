"""Python processes with torch, Ray and vesuvius already imported: they start in milliseconds instead of seconds.

A server, one per test process, forks a process for each command.  It was itself forked from the test process after all
tests were imported, and imports the rest at its first request.  `Popen` and `run` are those of `subprocess` for
commands of this interpreter: `-m module`, `-c code` or a script.  The test processes of xdist come from such a server
as well, which imports their tests.

Forked processes keep the environment in /proc, the command line and the interpreter options of the test process, and
libraries have already read their variables on import.  Tests of these use `subprocess`.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import fcntl
import functools
import gc
import importlib
import json
import logging
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest

_PRELOADED = (
    "torch",
    "torch._dynamo",  # which the first optimizer imports
    "vesuvius.stream.ray",  # sets the environment that Ray reads when it is imported
    "ray.data",
    "ray.dag",  # which the end of Ray imports
    "matplotlib.pyplot",
    "PIL.Image",
    "yaml",
    "vesuvius.stream.ray.session",
    "vesuvius.training.run",
    "vesuvius.commands.train",
    "vesuvius.launch.ray_train",
    "vesuvius.commands.sample",
    "vesuvius.commands.memcheck",
    "vesuvius.commands.volume",
)
_PYTHON = sys.executable
_INHERIT = -1
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_MOST_FDS = 32
_LENGTH = struct.Struct("<I")


class Popen(subprocess.Popen[Any]):
    """Like `subprocess.Popen`, for a command beginning with `sys.executable`; forked from the server."""

    def _execute_child(  # type: ignore[override]
        self, args: Sequence[Any], executable: Any, preexec_fn: Any, close_fds: bool, pass_fds: Sequence[int], cwd: Any,
        env: Any, startupinfo: Any, creationflags: int, shell: bool, p2cread: int, p2cwrite: int, c2pread: int,
        c2pwrite: int, errread: int, errwrite: int, *others: Any,
    ) -> None:  # fmt: skip
        *_, start_new_session, _ = others
        command = [os.fsdecode(os.fspath(word)) for word in args]
        assert command[0] == sys.executable, command
        assert command[1] in ("-m", "-c") or not command[1].startswith("-"), "options of the interpreter have no effect"
        assert preexec_fn is None
        assert not shell
        request = {
            "command": command[1:],
            "cwd": os.getcwd() if cwd is None else os.fspath(cwd),
            "env": dict(os.environ if env is None else env),
            "new_session": start_new_session,
        }
        standard = (p2cread, c2pwrite, errwrite)
        fds = {target: target if fd == _INHERIT else fd for target, fd in enumerate(standard)}
        assert _server is not None, "tests/conftest.py starts it"
        self.pid = _server.fork(request, fds | {fd: fd for fd in pass_fds})
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def run(
    command: Sequence[Any],
    *,
    timeout: float = 240,
    capture_output: bool = False,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Like `subprocess.run`, forked from the server."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, **options) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
    if check:
        done.check_returncode()
    return done


def start(command: Sequence[Any], **options: Any) -> subprocess.Popen[Any]:
    """`Popen`, or that of `subprocess` if the interpreter was replaced: a substitute for code under test."""
    return (Popen if sys.executable == _PYTHON else subprocess.Popen)(command, **options)


def start_server(tests: Sequence[str] = (), *, of_stand_in: bool = False) -> None:
    """Fork the server after the tests are imported and before the first one runs: a later fork would inherit thread
    locks, patches and descriptors of tests.  One that imports `tests` forks the test processes themselves."""
    global _server, _server_of_stand_in
    _measure_once()
    if of_stand_in:
        _server_of_stand_in = _Server(("tests.support.sim_device",))
    if "vesuvius.training.run" in sys.modules:
        _plan_the_tiny_run()  # for the tests of this process as well
    _server = _Server(tests)


@contextmanager
def of_stand_in() -> Iterator[None]:
    """Fork from a server that has had no backward pass: torch counts the devices, here the stand-in, in the first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "_server", _server_of_stand_in)
        yield


class _Server:
    """The other end of the server's socket; it ends with this process."""

    def __init__(self, tests: Sequence[str]) -> None:
        self._one_at_a_time, self._owner = threading.Lock(), os.getpid()
        self._socket, theirs = socket.socketpair()
        self._pid = os.fork()
        if not self._pid:
            self._socket.close()
            _main(theirs, tests)
        theirs.close()
        atexit.register(self.close)

    def fork(self, request: dict[str, Any], fds: dict[int, int]) -> int:
        """Start a process with these descriptors (its number: ours).  Returns its id; it is a child of this process."""
        message = json.dumps(request | {"fds": list(fds)}).encode()
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        with self._one_at_a_time:
            # The server's child forks the process and ends, and orphans are given to the nearest subreaper.
            assert prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
            try:
                socket.send_fds(self._socket, [_LENGTH.pack(len(message))], list(fds.values()))
                self._socket.sendall(message)
                reply = self._socket.recv(_LENGTH.size, socket.MSG_WAITALL)
            finally:
                prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        assert len(reply) == _LENGTH.size, "the fork server has ended; see its stderr above"
        return int(_LENGTH.unpack(reply)[0])

    def close(self) -> None:
        if os.getpid() == self._owner:  # not at the exit of what another server forked
            self._socket.close()
            os.waitpid(self._pid, 0)


_server: _Server | None = None
_server_of_stand_in: _Server | None = None


def _serve(connection: socket.socket, tests: Sequence[str]) -> dict[str, Any] | None:
    """Fork a process for each request.  Returns the request in that process, and None in the server at its end."""
    imported: dict[str, str] | None = None
    while True:
        head, fds, _, _ = socket.recv_fds(connection, _LENGTH.size, _MOST_FDS)
        if not head:
            return None
        imported = _import_all(tests) if imported is None else imported
        request: dict[str, Any] = json.loads(connection.recv(_LENGTH.unpack(head)[0], socket.MSG_WAITALL))
        read, write = os.pipe()
        between = os.fork()
        if not between:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.0005)
            # A test process that is ended at once takes it along; its environment in /proc bears no mark of ours.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            # Whoever has its number may send signals to it and to its group.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if request["new_session"]:
                os.setsid()
            os.write(write, _LENGTH.pack(os.getpid()))
            for fd in (connection.detach(), read, write):
                os.close(fd)
            return request | {"fds": dict(zip(request["fds"], fds, strict=True)), "env": imported | request["env"]}
        os.close(write)
        os.waitpid(between, 0)
        connection.sendall(os.read(read, _LENGTH.size))
        for fd in (read, *fds):
            os.close(fd)


def _become(request: dict[str, Any]) -> None:
    """Take over descriptors, directory and environment of a new process."""
    high = {target: fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for target, fd in request["fds"].items()}
    for fd in request["fds"].values():
        os.close(fd)
    for target, fd in high.items():
        os.dup2(fd, target)
        os.close(fd)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    # Set by the Ray of the test process.  Ray's core read the variable when it was imported here, without it, so the
    # servers of this process's own Ray would want a token that its client does not send.
    os.environ.pop("RAY_AUTH_MODE", None)
    sys.path[:0] = [
        path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path
    ]
    tempfile.tempdir = None  # TMPDIR may be another
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - until the process ends
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", encoding="utf-8", closefd=False)  # noqa: SIM115


def _run(what: str, *arguments: str) -> None:
    """Execute the command line like the interpreter."""
    if what == "-m":
        module, *rest = arguments
        sys.path.insert(0, os.getcwd())
        sys.argv = [module, *rest]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    elif what == "-c":
        code, *rest = arguments
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), main.__dict__)
    else:
        sys.path.insert(0, str(Path(what).parent))
        sys.argv = [what, *arguments]
        runpy.run_path(what, run_name="__main__")


def _plan_the_tiny_run(*, backward: bool = True) -> None:
    """Plan once what each dry run plans on a CPU, which takes a second; half of it without a backward pass."""
    import torch

    from tests.support.tiny import tiny_sections
    from vesuvius.config import Config
    from vesuvius.training.forecast.memory_plan import plan_memory, traced_step

    config = Config.model_validate_json(json.dumps(tiny_sections("tiny", Path("v.zarr"))))
    if not backward:
        traced_step(config, "off")
        return
    # The first backward pass counts the GPUs and starts a thread for each.  Under fake tensors a torch that is built
    # for CUDA counts one where there is none; with that thread it refuses all backward passes of forked processes.
    torch.ones((), requires_grad=True).backward()
    plan_memory(config, amp="off")


def _measure_once() -> None:
    """What runs and dry runs measure: half a second of CPU each time."""
    if start_log := sys.modules.get("vesuvius.training.forecast.start_log"):  # no test needs torch for this alone
        start_log._MEASURED_S = 0.0
    if "torch" in sys.modules:  # else no test of this process trains; the module may be imported later
        validation: Any = importlib.import_module("vesuvius.training.validation.validation")
        validation._MOST = validation._LEAST  # patches for the spectrum of a tiny run
    run_dir = sys.modules.get("vesuvius.runlog.run_dir")
    if run_dir and not hasattr(run_dir._commit, "__wrapped__"):
        run_dir.installed_version = functools.cache(run_dir.installed_version)
        run_dir._commit = functools.cache(run_dir._commit)


_INTERRUPTED = -1


def _exit_code_of(command: list[str]) -> int:
    """Run it, and print the traceback of an exception."""
    try:
        _run(*command)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        return _INTERRUPTED
    except BaseException:
        traceback.print_exc()
    else:
        return 0
    return 1


def _end(code: int) -> NoReturn:
    """Exit like the interpreter, but without tearing down modules: 0.6 s of CPU, as all their pages would be copied."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = 120
        except ValueError:  # it was closed
            pass
    if code == _INTERRUPTED:  # as the interpreter ends behind an uncaught KeyboardInterrupt
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _main(connection: socket.socket, tests: Sequence[str]) -> NoReturn:
    """The server: resets what pytest has set up in its parent, and forks until that ends."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the server ends with the tests
        faulthandler.disable()
        os.closerange(3, connection.fileno())
        os.closerange(connection.fileno() + 1, 2**16)
        logging.getLogger().handlers.clear()
        sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
        threading.excepthook = threading.__excepthook__
        importlib.reload(warnings)  # pytest notes them down
        warnings.resetwarnings()
        for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)
        if request := _serve(connection, tests):
            _become(request)
            _end(_exit_code_of(request["command"]))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _import_all(tests: Sequence[str]) -> dict[str, str]:
    """Import what commands and these tests need.  Returns the environment variables set by this."""
    before = dict(os.environ)
    for name in _PRELOADED:
        importlib.import_module(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # tests count the GPUs, with CUDA for this process alone
        for name in tests:
            with suppress(Exception, pytest.skip.Exception):  # which the test process then meets
                importlib.import_module(name)
        # A backward pass would keep processes of tests from using a GPU or the stand-in; a step would, where one is.
        if not tests or not sys.modules["torch"].cuda.is_available():
            _plan_the_tiny_run(backward=not tests)
    if colorama := sys.modules.get("colorama"):  # of a test's Ray cluster: at exit it writes to the terminal
        atexit.unregister(colorama.initialise.reset_all)
    for finalizer, of in weakref.finalize._registry.items():  # type: ignore[attr-defined]
        if of.func.__name__ == "_del_library":  # torch's: at exit they take 0.1 s
            finalizer.atexit = False
    _measure_once()
    run_dir = sys.modules["vesuvius.runlog.run_dir"]
    run_dir._commit()
    for name in run_dir._PACKAGES:
        run_dir.installed_version(name)
    gc.freeze()
    return {name: value for name, value in os.environ.items() if before.get(name) != value}
