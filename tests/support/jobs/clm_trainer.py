"""Causal language modelling with the Trainer, like transformers' run_clm.py.

    python tests/support/jobs/clm_trainer.py --output_dir FOLDER ...                one process
    accelerate launch --config_file examples/accelerate/cpu_4.yaml \
        tests/support/jobs/clm_trainer.py --output_dir FOLDER --ep_size 2 ...       4 ranks at ep 2

The arguments are dataclasses, one of them TrainingArguments. Texts are tokenized and split into
blocks. Evaluation turns logits into predictions batch by batch, and computes accuracy and
perplexity. `--ep_size` adds two lines, an import and a call. FOLDER gets the model and the files
that the Trainer writes: trainer_state.json and all_results.json.
"""

import math
import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EvalPrediction,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from support.jobs.clm_no_trainer import blocks
from support.tiny_models import tiny
from support.words import make_tokenizer


@dataclass
class ModelArguments:
    ep_size: int | None = None
    aux_loss: bool = False


@dataclass
class DataArguments:
    max_train_samples: int = 32
    max_eval_samples: int = 12


def most_likely(logits: Any, labels: Tensor) -> Tensor:
    """Return the most likely token of each position. All logits would need too much memory."""
    if isinstance(logits, tuple):  # (aux loss, logits, router logits)
        logits = next(output for output in logits if output.ndim == 3)
    return logits.argmax(-1)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    labels = prediction.label_ids[:, 1:].reshape(-1)
    predicted = prediction.predictions[:, :-1].reshape(-1)
    return {"accuracy": float((labels == predicted).mean()), "predicted": len(predicted)}


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_options, data_options, training = parser.parse_args_into_dataclasses()
    set_seed(training.seed)
    options = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    model = tiny(dtype=torch.float32, **(options if model_options.aux_loss else {}))
    if model_options.ep_size:
        from hf_moe_ep import patch

        patch(model, ep_size=model_options.ep_size)
    words = make_tokenizer(model.config.vocab_size)
    data = blocks(model.config.vocab_size)
    num_eval, num_train = data_options.max_eval_samples, data_options.max_train_samples
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=data.select(range(num_eval, num_eval + num_train)),
        eval_dataset=data.select(range(num_eval)),
        processing_class=words,
        data_collator=default_data_collator,
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=most_likely,
    )
    if training.do_train:
        result = trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
        trainer.save_model()
        metrics = result.metrics | {"train_samples": num_train}
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()
    if training.do_eval:
        metrics = trainer.evaluate()
        metrics |= {"eval_samples": num_eval, "perplexity": math.exp(metrics["eval_loss"])}
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip destructors: a thread of torch that nobody joins sometimes aborts the exit (SIGABRT).
    os._exit(0)
