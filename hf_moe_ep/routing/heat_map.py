"""Draw heat maps of counts [layers, experts] in the panels of one picture, with matplotlib."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from torch import Tensor

try:
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError(
        "a heat map of experts is drawn by matplotlib, which is not installed: "
        "pip install matplotlib (it is part of hf_moe_ep[demo])"
    ) from error

_PANELS_IN_A_ROW = 4


def draw_heat_maps(
    counts_by_panel: Sequence[Tensor], titles: Sequence[str], path: str | os.PathLike[str]
) -> None:
    """Draw one panel per tensor of counts. All panels have one color scale.

    The color of an expert shows its count divided by the mean count of its layer.
    """
    relative = [counts / counts.double().mean(1, keepdim=True) for counts in counts_by_panel]
    highest = max(float(values.nan_to_num(0.0).max()) for values in relative)
    columns = min(len(counts_by_panel), _PANELS_IN_A_ROW)
    rows = math.ceil(len(counts_by_panel) / columns)
    # pyplot is not used, because it would choose a backend for the process and keep the figure.
    figure = Figure(figsize=(1.5 + 3.2 * columns, 0.6 + 2.4 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    images = []
    for index, axis in enumerate(axes.flat):
        if index >= len(counts_by_panel):
            axis.set_axis_off()
            continue
        values = relative[index].numpy()
        images.append(
            axis.imshow(
                values, vmin=0.0, vmax=max(highest, 1.0), aspect="auto", interpolation="nearest"
            )
        )
        axis.set_title(titles[index], fontsize=9)
        axis.label_outer()
    figure.supxlabel("expert")
    figure.supylabel("layer")
    figure.colorbar(images[0], ax=axes, label="tokens / mean of the layer")
    figure.savefig(os.fspath(path), dpi=120, format="png")
