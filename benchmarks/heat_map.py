"""The drift of a calibration as a picture: layers against ages, one panel per part and kind of row."""

from pathlib import Path
from typing import Any

import numpy as np


def write_heat_map(document: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds, parts = document["kinds"], list(document["drift"])
    figure, panels = pyplot.subplots(
        len(parts), len(kinds), figsize=(3.2 * len(kinds), 3.6 * len(parts)), sharex=True, sharey=True, squeeze=False
    )
    tables = {part: np.array(document["drift"][part], dtype=float) for part in parts}
    most = float(np.nanmax([np.nanmax(table) for table in tables.values()]))
    image = None
    for row, part in enumerate(parts):
        for column, kind in enumerate(kinds):
            panel = panels[row][column]
            image = panel.imshow(tables[part][:, :, column], aspect="auto", vmin=0, vmax=most, origin="lower")
            panel.set_title(f"{part}, {kind}", fontsize=9)
            panel.set_xticks(range(len(document["ages"])), [str(age) for age in document["ages"]])
            if column == 0:
                panel.set_ylabel("layer")
            if row == len(parts) - 1:
                panel.set_xlabel("age (steps)")
    assert image is not None, "a calibration has parts and kinds"
    figure.colorbar(image, ax=panels, label="mean relative change of the delta", shrink=0.8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
