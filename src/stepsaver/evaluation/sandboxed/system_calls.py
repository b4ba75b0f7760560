"""A kernel filter against system calls that no honest program needs, or that limits per process do not cover."""

import ctypes
import errno
import os
import struct

LOAD, IF_EQUAL, IF_AT_LEAST, IF_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
KILL, ALLOW, REFUSE = 0x80000000, 0x7FFF0000, 0x00050000
CALL, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in the data that the kernel gives a filter
OTHER_ABI = 0x40000000  # numbers from here on belong to another ABI on the same machine
CLONE_THREAD, AF_UNIX, PR_SET_PDEATHSIG, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 0x10000, 1, 1, 22, 2

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Numbers on x86_64 and aarch64. Calls of the first table are judged by their arguments, or get their own error.
JUDGED = {"socket": (41, 198), "socketpair": (53, 199), "clone": (56, 220), "prctl": (157, 167), "clone3": (435, 435)}
REFUSED: dict[str, tuple[int, int | None]] = {  # None: the machine has no such call
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "perf_event_open": (298, 241), "bpf": (321, 280),
    "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "memfd_secret": (447, 447),
    "kexec_load": (246, 104), "init_module": (175, 105), "finit_module": (313, 273), "personality": (135, 92),
    "fanotify_init": (300, 262), "inotify_init1": (294, 26), "inotify_init": (253, None), "syslog": (103, 116),
    "setsid": (112, 157), "setpgid": (109, 154), "fork": (57, None), "vfork": (58, None),
    "timer_create": (222, 107), "modify_ldt": (154, None),
}  # fmt: skip
Instruction = tuple[int, int, int, int]


def refused(number: int) -> list[Instruction]:
    return [(IF_EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE | errno.EPERM)]


def by_first_argument(number: int, test: tuple[int, int], *, allowed: bool, error: int) -> list[Instruction]:
    """Allows a call if the test of its first argument holds (with `allowed=False`, if it fails). Else refuses it."""
    code, operand = test
    return [
        (IF_EQUAL, 0, 4, number),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (code, *((1, 0) if allowed else (0, 1)), operand),
        (RETURN, 0, 0, REFUSE | error),
        (RETURN, 0, 0, ALLOW),
    ]


def instructions(machine: str) -> list[Instruction]:
    if machine not in MACHINES:
        raise OSError(0, f"no filter of system calls is known for {machine}")
    column = list(MACHINES).index(machine)
    numbers = [both[column] for both in REFUSED.values()]
    socket, pair, clone, control, clone3 = (both[column] for both in JUDGED.values())
    return [
        (LOAD, 0, 0, ARCHITECTURE),
        (IF_EQUAL, 1, 0, MACHINES[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, CALL),
        (IF_AT_LEAST, 0, 1, OTHER_ABI),
        (RETURN, 0, 0, REFUSE | errno.EPERM),
        *(each for number in numbers if number is not None for each in refused(number)),
        # No address family at all: the standard library itself (asyncio) only makes pairs of unix sockets.
        (IF_EQUAL, 0, 1, socket),
        (RETURN, 0, 0, REFUSE | errno.EAFNOSUPPORT),
        (IF_EQUAL, 0, 1, clone3),  # a filter cannot see its flags; libraries then use clone
        (RETURN, 0, 0, REFUSE | errno.ENOSYS),
        *by_first_argument(clone, (IF_ANY_BIT, CLONE_THREAD), allowed=True, error=errno.EPERM),
        *by_first_argument(pair, (IF_EQUAL, AF_UNIX), allowed=True, error=errno.EAFNOSUPPORT),
        # It would outlive its supervisor.
        *by_first_argument(control, (IF_EQUAL, PR_SET_PDEATHSIG), allowed=False, error=errno.EPERM),
        (RETURN, 0, 0, ALLOW),
    ]


def forbid_calls(libc: ctypes.CDLL) -> None:
    """Applies the filter to this process and all its children. `no_new_privs` must be set."""
    filters = instructions(os.uname().machine)
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in filters))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(filters), ctypes.addressof(code)))
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp: {os.strerror(number)}")
