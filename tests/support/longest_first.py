"""The test files that take longest, for the order in which workers take them."""

# A worker takes the next file when it is done with one (make test): those that take longest go
# first, or one worker would wait at the end for the other's.
LONGEST_FIRST = (
    "integrations/test_trainer.py",
    "checkpoints/test_training.py",
    "vision/test_tower.py",
    "ops/test_adapters.py",
    "checkpoints/test_hub.py",
    "claims/test_parity.py",
    "sequence/test_ulysses.py",
    "claims/test_notebooks.py",
    "ops/test_compile.py",
    "ops/test_expert_mlp.py",
    "integrations/test_trainer_sp.py",
    "lora/test_attach.py",
    "planner/test_held.py",
    "checkpoints/test_convert.py",
    "moe/test_recompute.py",
    "claims/test_dispatch_bytes.py",
    "claims/test_errors.py",
    "claims/test_hub_memory_and_kills.py",
    "claims/test_lora_memory.py",
    "integrations/test_accelerate.py",
)
