"""Walls around one process: namespaces, a root folder in memory, user nobody, limits, a filter of system calls.

The process goes through three steps: it is cloned into new namespaces, walled in, and replaced by an interpreter that
runs one module of this folder. An error before the last step goes to the status pipe, which the last step closes.
"""

import ctypes
import os
import resource
import signal
import stat
from dataclasses import dataclass
from typing import Any

from stepsaver.evaluation.sandboxed import command
from stepsaver.evaluation.sandboxed.system_calls import forbid_calls

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 1, 38, 47, 4
CLONE_NUMBER = {"x86_64": 56, "aarch64": 220}
NOBODY = 65534
SYSTEM = ("/usr", "/lib", "/lib64", "/bin")
INSIDE = "/sandbox"  # where a walled process finds this folder

libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class WalledProcess:
    """One walled process: the module it runs, its standard streams, and the one other descriptor it keeps."""

    module: str
    standard_input: int
    standard_output: int
    channel: int


def start_walled(walled: WalledProcess, settings: dict[str, Any]) -> int:
    """Starts the module and returns the process id. Raises OSError if the machine does not allow a wall."""
    status_read, status_write = os.pipe()
    process = _clone()
    if process == 0:
        try:
            _become(walled, settings)
        except BaseException as error:
            os.write(status_write, (str(error) or type(error).__name__).encode("utf-8", "replace")[:500])
        os._exit(1)
    os.close(status_write)
    fault = os.read(status_read, 500)
    os.close(status_read)
    if fault:
        os.waitpid(process, 0)
        raise OSError(0, fault.decode("utf-8", "replace"))
    return process


def _call(name: str, *arguments: Any) -> int:
    result: int = getattr(libc, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def _clone() -> int:
    """Forks into new namespaces: processes, network, mounts, host name, queues; for an ordinary user, users too.

    Called by number, because one process starts two walled ones, and `unshare` makes only one process namespace.
    """
    machine = os.uname().machine
    if machine not in CLONE_NUMBER:
        raise OSError(0, f"no sandbox is known for {machine}")
    flags = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET | signal.SIGCHLD
    if os.geteuid() != 0:
        flags |= CLONE_NEWUSER
    try:
        return _call("syscall", CLONE_NUMBER[machine], ctypes.c_ulong(flags), *[ctypes.c_ulong(0)] * 4)
    except OSError as error:
        raise OSError(error.errno, f"clone into namespaces: {os.strerror(error.errno or 0)}") from None


def _become(walled: WalledProcess, settings: dict[str, Any]) -> None:
    """Runs in the first process of the namespace. When it ends, everything it started ends too."""
    os.setsid()  # signals to a process group cross namespaces
    user, group = settings["user"], settings["group"]
    if user != 0:
        _map_to_nobody(user, group)
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for source, target in (
        (walled.standard_input, 0),
        (walled.standard_output, 1),
        (os.open(os.devnull, os.O_RDWR), 2),
    ):
        os.dup2(source, target)
    _build_root(settings)
    if user == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    _call("prctl", PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # again: a change of user clears it
    _limit(settings["limits"])
    os.set_inheritable(walled.channel, True)  # the last step closes every other descriptor
    forbid_calls(libc)
    words = command(settings["interpreter"], walled.module, folder=INSIDE, argument=str(walled.channel))
    os.execve(words[0], words, {"LANG": "C.UTF-8"})


def _map_to_nobody(user: int, group: int) -> None:
    for name, line in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {user} 1"), ("gid_map", f"{NOBODY} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    try:
        _call("mount", *(text.encode() for text in (source, target, kind)), flags, options.encode())
    except OSError as error:
        raise OSError(error.errno, f"mount {target}: {os.strerror(error.errno or 0)}") from None


def _build_root(settings: dict[str, Any]) -> None:
    """Builds a root folder in memory: interpreter and system libraries (read-only), a small `/tmp`, nothing else."""
    _mount("none", "/", "", MS_REC | MS_PRIVATE)
    shown = {folder: folder for folder in (*SYSTEM, settings["interpreter_folder"])}
    shown[settings["folder"] + "/sandboxed"] = INSIDE + "/sandboxed"
    # Opened before the new root covers /tmp, which may contain the package or the interpreter.
    present = {folder: target for folder, target in shown.items() if os.path.lexists(folder)}
    opened = {target: os.open(folder, os.O_PATH | os.O_NOFOLLOW) for folder, target in present.items()}
    root = "/tmp"
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=16m,mode=755")
    os.mkdir(f"{root}/dev")
    open(f"{root}/dev/null", "w").close()
    _mount("/dev/null", f"{root}/dev/null", "", MS_BIND)
    for target, descriptor in opened.items():
        _place_read_only(descriptor, root + target)
    os.mkdir(f"{root}/proc")
    _mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV)
    os.mkdir(f"{root}/tmp")
    size = settings["limits"]["file_bytes"]
    _mount("tmpfs", f"{root}/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"size={size},mode=1777,nr_inodes=256")
    _mount("none", root, "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID)
    os.chroot(root)
    os.chdir("/tmp")


def _place_read_only(source: int, target: str) -> None:
    if os.path.lexists(target):
        return  # inside one of the other folders
    if stat.S_ISLNK(os.fstat(source).st_mode):
        os.symlink(os.readlink("", dir_fd=source), target)
        return
    os.makedirs(target)
    _mount(f"/proc/self/fd/{source}", target, "", MS_BIND | MS_REC)
    _mount("none", target, "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | _kept_flags(target))


def _kept_flags(target: str) -> int:
    """Flags that an ordinary user may not drop in a remount. They have the same bits here and in `statvfs`."""
    return os.statvfs(target).f_flag & (MS_NODEV | 8)  # 8: noexec


def _limit(limits: dict[str, Any]) -> None:
    seconds = int(limits["seconds"]) + 1
    for kind, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_NPROC, limits["threads"]),
    ):
        resource.setrlimit(kind, (value, value))
