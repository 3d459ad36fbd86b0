"""In the backbone of ViTPose, the data set of a picture chooses the expert."""

from __future__ import annotations

REFUSED = (
    "its experts are chosen by the data set of a whole picture, and not by a router for each "
    "token, so there are no tokens to send to other ranks. Train it with FSDP2 alone"
)
