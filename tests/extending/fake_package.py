"""A package that is installed, as far as `importlib.metadata` can tell: a module and its dist-info."""

from pathlib import Path


def write_package(folder: Path, name: str, module: str, entries: dict[str, dict[str, str]]) -> Path:
    """`entries` are by group, from the entry's name to what it leads to."""
    (folder / f"{name}.py").write_text(module, encoding="utf-8")
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    lines = [
        line
        for group, members in entries.items()
        for line in (f"[{group}]", *(f"{entry} = {value}" for entry, value in members.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder
