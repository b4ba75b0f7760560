"""What runs inside the sandbox, with only the standard library (`stepsaver.evaluation.sandbox` explains it), and the
command that starts a module of this folder in an interpreter without the rest of the package.
"""

CODE = """
import sys, types
for name, folder in (("stepsaver", ""), ("stepsaver.evaluation", {folder!r})):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from stepsaver.evaluation.sandboxed.{module} import main
main(sys.argv[1])
"""


def command(interpreter: str, module: str, *, folder: str, argument: str) -> list[str]:
    """`folder` holds `sandboxed/`. The packages above it stay empty, because they may import what is missing there."""
    return [interpreter, "-I", "-S", "-c", CODE.format(folder=folder, module=module), argument]
