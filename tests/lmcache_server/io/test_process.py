"""Whether a process is gone: by pid, start and pid namespace."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from lmcache_server.io.process import process_gone
from lmcache_server.protocol.messages import ProcessId


def facts_of(pid: int) -> ProcessId:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return ProcessId(pid, int(fields[19]), os.stat("/proc/self/ns/pid").st_ino)


def test_a_running_process_is_not_gone() -> None:
    assert process_gone(facts_of(os.getpid())) is False


def test_an_ended_process_is_gone_also_as_a_zombie() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        facts = facts_of(child.pid)
        assert process_gone(facts) is False
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process_gone(facts) is True
    assert process_gone(facts) is True


def test_another_process_under_the_same_pid_is_not_the_one_that_is_gone() -> None:
    facts = facts_of(os.getpid())
    assert process_gone(msgspec.structs.replace(facts, started=facts.started - 1)) is True


def test_a_process_of_another_namespace_cannot_be_seen() -> None:
    facts = facts_of(os.getpid())
    assert process_gone(msgspec.structs.replace(facts, namespace=facts.namespace + 1)) is None


@pytest.mark.parametrize("pid", [-1, 0, 2**63, 2**22 + 1])
def test_a_pid_that_cannot_be_is_gone(pid: int) -> None:
    assert process_gone(msgspec.structs.replace(facts_of(os.getpid()), pid=pid)) is True


def test_a_hidden_process_cannot_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(*_: object, **__: object) -> str:
        raise PermissionError

    facts = facts_of(os.getpid())
    monkeypatch.setattr(Path, "read_text", hidden)
    assert process_gone(facts) is None
