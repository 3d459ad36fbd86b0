"""What is written to disk and read back, at any layout.

`storage/` bytes, knows no model; `hub/` a model and the hub's layout; `training/` what a run goes
on from. Never: how parameters came to lie where they lie (`sharding/`).
"""
