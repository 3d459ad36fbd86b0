"""Code that tests share: ranks, tiny models, errors, fakes, jobs. `tests/` tests it."""
