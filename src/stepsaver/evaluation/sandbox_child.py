"""Runs inside the sandbox's first process, with a clean environment: builds the walls, then becomes the program.

It is started as a script and imports nothing of this package. Arguments: JSON with the limits and the interpreter. The
program comes on standard input; what became of it goes to standard output, once, as one short line.
"""

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from typing import Any

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 1, 38, 47, 4
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
LOAD, IF_EQUAL, IF_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
KILL, ALLOW, REFUSE = 0x80000000, 0x7FFF0000, 0x00050001
# shmget, semget, msgget, ptrace, add_key, keyctl, unshare, setns, bpf, userfaultfd, io_uring_setup
FORBIDDEN = {
    "x86_64": (0xC000003E, (29, 64, 68, 101, 248, 250, 272, 308, 321, 323, 425)),
    "aarch64": (0xC00000B7, (194, 190, 186, 117, 217, 219, 97, 268, 280, 282, 425)),
}
SIGKILL = 9
NOBODY = 65534
STARTING_SECONDS = 0.2  # the walls and the interpreter, beyond the program's own time
CANNOT_ISOLATE = 97  # exit status: the machine does not allow the walls

# Executes the program from descriptor 0 and reports on descriptor 1, after it has ended by itself. The program's own
# output goes nowhere. Everything that it can raise is a failure, an exit included.
RUNNER = """
import os, sys
report = os.dup(1)
source = sys.stdin.read()
for descriptor in (0, 1, 2):
    os.dup2(os.open("/dev/null", os.O_RDWR), descriptor)
try:
    exec(compile(source, "program", "exec"), {"__name__": "__main__"})
    outcome = "passed"
except BaseException as error:
    outcome = "failed: " + type(error).__name__ + ": " + str(error)[:200]
os.write(report, outcome.encode("utf-8", "replace")[:1000])
os._exit(0)
"""

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> None:
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    call("mount", *(text.encode() for text in (source, target, kind)), flags, options.encode())


def enter_namespaces() -> None:
    """Own processes, network, mounts, host name and queues. For an ordinary user that takes a user namespace."""
    flags = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        call("unshare", flags)
        return
    call("unshare", flags | CLONE_NEWUSER)
    for name, line in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {user} 1"), ("gid_map", f"{NOBODY} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)


def build_root(interpreter_folder: str, file_bytes: int) -> None:
    """A root of its own in memory: the interpreter and system libraries read-only, `/tmp` small, nothing else."""
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    root = "/tmp"
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=16m,mode=755")
    os.mkdir(f"{root}/dev")
    open(f"{root}/dev/null", "w").close()
    mount("/dev/null", f"{root}/dev/null", "", MS_BIND)
    for folder in ("/usr", "/lib", "/lib64", "/bin", interpreter_folder):
        place_read_only(folder, root + folder)
    os.mkdir(f"{root}/proc")
    mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV)
    os.mkdir(f"{root}/tmp")
    mount("tmpfs", f"{root}/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"size={file_bytes},mode=1777,nr_inodes=256")
    mount("none", root, "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID)
    os.chroot(root)
    os.chdir("/tmp")


def place_read_only(folder: str, target: str) -> None:
    if os.path.lexists(target) or not os.path.lexists(folder):
        return
    if os.path.islink(folder):
        os.symlink(os.readlink(folder), target)
        return
    os.makedirs(target)
    mount(folder, target, "", MS_BIND | MS_REC)
    mount("none", target, "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | kept_flags(target))


def kept_flags(target: str) -> int:
    """Flags that an ordinary user may not drop when he remounts; they have the same bits here and in `statvfs`."""
    return os.statvfs(target).f_flag & (MS_NODEV | 8)  # 8: noexec


def forbid_calls() -> None:
    """A filter in the kernel: what no honest program needs, and what limits per process do not reach, is refused."""
    machine = os.uname().machine
    if machine not in FORBIDDEN:
        raise OSError(0, f"no filter of system calls is known for {machine}")
    architecture, numbers = FORBIDDEN[machine]
    count = len(numbers)
    filters = [
        (LOAD, 0, 0, 4),  # the architecture
        (IF_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, 0),  # the call's number
        (IF_AT_LEAST, count + 1, 0, 0x40000000),  # numbers of another ABI on the same machine
        *((IF_EQUAL, count - place, 0, number) for place, number in enumerate(numbers)),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, REFUSE),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in filters))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(filters), ctypes.addressof(code)))
    call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)


def limit(limits: dict[str, Any]) -> None:
    seconds = int(limits["seconds"]) + 1
    for kind, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, limits["processes"]),
    ):
        resource.setrlimit(kind, (value, value))


def become_program(arguments: dict[str, Any]) -> None:
    """The first process of the namespace. When it ends, whatever it started ends with it."""
    call("prctl", PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    build_root(arguments["interpreter_folder"], arguments["limits"]["file_bytes"])
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    call("prctl", PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("prctl", PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)  # a change of user clears it
    limit(arguments["limits"])
    forbid_calls()
    os.execve(arguments["interpreter"], [arguments["interpreter"], "-I", "-S", "-c", RUNNER], {"LANG": "C.UTF-8"})


def main() -> None:
    arguments = json.loads(sys.argv[1])
    try:
        enter_namespaces()
    except OSError as error:
        os.write(1, str(error).encode())
        os._exit(CANNOT_ISOLATE)
    process = os.fork()
    if process == 0:
        try:
            become_program(arguments)
        except OSError as error:
            os.write(1, str(error).encode())
        os._exit(CANNOT_ISOLATE)
    os._exit(wait(process, arguments["limits"]["seconds"]))


def wait(process: int, seconds: float) -> int:
    """Waits for the program outside of its namespace, where it cannot reach the clock."""

    def give_up(number: int, frame: Any) -> None:
        os.kill(process, SIGKILL)
        os.write(1, f"timed out after {seconds:g} s".encode())

    signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds + STARTING_SECONDS)
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status) & 0x7F


if __name__ == "__main__":
    main()
