"""Tables of the runs of TRL's trainers that tests compare with stock."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """A run of a trainer on 4 ranks.

    Attributes:
        reference: "none" (TRL loads the policy's checkpoint, or needs none), "stock" or "patched".
        lora: "ours" if the script attaches adapters, which TRL copies for the reference. "TRL's" if
            TRL attaches them, and switches them off for the reference.
        data: "pairs" of prompt and completion, "chat" or "tokens".
        refused: the words of the expected error.
        model: a name of `tiny_models.tiny`.
        each_rank: stock runs on the same number of ranks, with DDP, instead of in one process.
    """

    name: str
    trainer: str
    reference: str = "none"
    lora: str = ""
    ep: int = 2
    sp: int = 1
    cp: int = 1
    pp: int = 1
    reference_ep: int = 2
    data: str = "pairs"
    arguments: dict[str, Any] = field(default_factory=dict)
    refused: str = ""
    model: str = "qwen3_moe"
    each_rank: bool = False


PACKED = {"packing": True, "max_length": 16}
ASSISTANT = {"assistant_only_loss": True}
SFT = [
    Case("SFT, completions", "SFT"),
    Case("SFT, completions, ep 4", "SFT", ep=4),
    Case("SFT, completions, sp 2", "SFT", sp=2),
    Case("SFT, chat", "SFT", data="chat", arguments=ASSISTANT),
    Case("SFT, chat, sp 2", "SFT", data="chat", sp=2, arguments=ASSISTANT),
    Case("SFT, packed", "SFT", data="tokens", arguments=PACKED),
    Case("SFT, packed, cp 2", "SFT", data="tokens", cp=2, arguments=PACKED),
    Case("SFT, LoRA, chat, cp 2", "SFT", lora="TRL's", cp=2, data="chat", arguments=ASSISTANT),
    Case("SFT, LoRA, completions", "SFT", lora="TRL's"),
    Case("SFT, LoRA, packed, sp 2", "SFT", lora="TRL's", sp=2, data="tokens", arguments=PACKED),
    Case("SFT, LoRA, chat, ep 4", "SFT", lora="TRL's", ep=4, data="chat", arguments=ASSISTANT),
]

NO_HEAD = "sp_size (2) > 1 needs a model that computes a loss of its tokens"
REWARD = [
    Case("reward", "Reward"),
    Case("reward, ep 4", "Reward", ep=4),
    Case("reward, LoRA", "Reward", lora="TRL's"),
    Case("reward, LoRA, ep 4", "Reward", lora="TRL's", ep=4),
    Case("reward, sp 2", "Reward", sp=2, refused=NO_HEAD),
    Case("reward, LoRA, sp 2", "Reward", lora="TRL's", sp=2, refused=NO_HEAD),
]

SYNC = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
PRECOMPUTE = {"precompute_ref_log_probs": True}
# TRL computes its KL term from the batch of each rank, even in stock. So the loss has no KL term.
NO_KL = {"loss_type": "apo_zero_unpaired"}
OFF_POLICY = {"lmbda": 0.0}
# TRL's loss is then the mean of the ranks' means, and not the mean over the tokens of all ranks.
PER_RANK = OFF_POLICY | {"average_tokens_across_devices": False}
# The completions of a prompt are equal, and so are their rewards. Only the KL term to the reference
# has gradients.
GREEDY = {"beta": 0.5, "num_generations": 2, "max_completion_length": 6, "top_k": 1}
GENERATES = "lets each rank generate completions of its own"
PREFERENCES = [
    Case("stock reference", "DPO", "stock"),
    Case("patched reference", "DPO", "patched"),
    Case("no reference", "DPO"),
    Case("no reference, ep 4", "DPO", ep=4),
    Case("patched reference at another ep", "DPO", "patched", reference_ep=4),
    Case("stock reference, sp 2", "DPO", "stock", sp=2),
    Case("stock reference, cp 2", "DPO", "stock", cp=2),
    Case("stock reference, synchronised", "DPO", "stock", arguments=SYNC),
    Case("patched reference, synchronised", "DPO", "patched", arguments=SYNC),
    Case("patched reference, precomputed", "DPO", "patched", arguments=PRECOMPUTE),
    Case("no reference, precomputed", "DPO", arguments=PRECOMPUTE),
    Case("adapters and their copy", "DPO", lora="ours"),
    Case("adapters and their copy, precomputed", "DPO", lora="ours", arguments=PRECOMPUTE),
    Case("adapters switched off", "DPO", lora="TRL's"),
    Case("adapters switched off, ep 4", "DPO", lora="TRL's", ep=4),
    Case("adapters switched off, sp 2", "DPO", lora="TRL's", sp=2),
    Case("adapters switched off, precomputed", "DPO", lora="TRL's", arguments=PRECOMPUTE),
    Case("vision-language, stock reference", "DPO", "stock", model="qwen3_vl_moe"),
    Case("vision-language, patched reference", "DPO", "patched", model="qwen3_vl_moe"),
    Case("vision-language, no reference", "DPO", model="qwen3_vl_moe"),
    Case("KTO, stock reference", "KTO", "stock", arguments=NO_KL),
    Case("KTO, patched reference", "KTO", "patched", arguments=NO_KL),
    Case("KTO, stock reference, sp 2", "KTO", "stock", sp=2, arguments=NO_KL),
    Case("KTO, stock reference, cp 2", "KTO", "stock", cp=2, arguments=NO_KL),
    Case("KTO, stock reference, ep 4", "KTO", "stock", ep=4, arguments=NO_KL),
    Case("KTO, adapters and their copy", "KTO", lora="ours", arguments=NO_KL),
    Case("KTO, adapters switched off", "KTO", lora="TRL's", arguments=NO_KL),
    Case("KTO, adapters switched off, ep 4", "KTO", lora="TRL's", ep=4, arguments=NO_KL),
    Case("KTO, adapters switched off, sp 2", "KTO", lora="TRL's", sp=2, arguments=NO_KL),
    Case("GRPO", "GRPO", arguments=GREEDY),
    Case("GRPO, sp 2", "GRPO", sp=2, arguments=GREEDY, refused=GENERATES),
    Case("GRPO, cp 2", "GRPO", cp=2, arguments=GREEDY, refused=GENERATES),
    Case("GRPO, LoRA, sp 2", "GRPO", sp=2, lora="TRL's", arguments=GREEDY, refused=GENERATES),
    Case("GRPO, stages", "GRPO", pp=2, arguments=GREEDY, refused=GENERATES),
    Case("DPO, stages", "DPO", pp=2, refused="DPO and GRPO do"),
    Case("RLOO, sp 2", "RLOO", sp=2, arguments=GREEDY, refused=GENERATES),
    Case("RLOO, LoRA, sp 2", "RLOO", sp=2, lora="TRL's", arguments=GREEDY, refused=GENERATES),
    Case("GKD, patched teacher", "GKD", "patched", arguments=OFF_POLICY),
    Case("GKD, beside ranks of stock", "GKD", "patched", arguments=OFF_POLICY, each_rank=True),
    Case("GKD, each rank's mean", "GKD", "patched", arguments=PER_RANK, each_rank=True),
    Case("GKD, patched teacher, LoRA", "GKD", "patched", lora="TRL's", arguments=OFF_POLICY),
    Case("GKD, patched teacher, ep 4", "GKD", "patched", ep=4, arguments=OFF_POLICY),
    Case("GKD, LoRA, ep 4", "GKD", "patched", lora="TRL's", ep=4, arguments=OFF_POLICY),
    Case("GKD, patched teacher, sp 2", "GKD", "patched", sp=2, arguments=OFF_POLICY),
    Case("GKD, patched teacher, cp 2", "GKD", "patched", cp=2, arguments=OFF_POLICY),
    Case("GKD, LoRA, sp 2", "GKD", "patched", lora="TRL's", sp=2, arguments=OFF_POLICY),
]

# Runs of tests/support/jobs/online.py, which generates: the trainer, and options of the script.
GENERATING = ("grpo", "grpo, LoRA", "grpo, LoRA, greedy", "rloo, greedy", "rloo, LoRA")
GENERATING_EP = (2, 4)
