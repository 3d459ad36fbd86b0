"""What tests are made of: ranks, tiny models, errors, fakes, jobs; `tests/` tests these."""
