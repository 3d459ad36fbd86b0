"""Test the table of wrapped functions: targets exist, and each is wrapped when it is needed.

`make test-oldest` runs these tests with the oldest versions that are supported.
"""

import importlib.metadata
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import accelerate.accelerator
import accelerate.utils.fsdp_utils
import pytest
import torch
from accelerate import Accelerator
from support import pages
from support.checks import Check, Found, on_ranks
from support.close import assert_close
from support.launched import FP32_BUDGET, launched
from support.tiny_models import batch, tiny
from torch import nn
from transformers import Trainer, TrainingArguments

from hf_moe_ep import apply_ep_fsdp2, patch
from hf_moe_ep.integrations import features
from hf_moe_ep.integrations.install import OBJECTS, PROCESS, SLOW_TO_IMPORT, report_wraps
from hf_moe_ep.runner.hook import LOADERS
from hf_moe_ep.state import find_state
from hf_moe_ep.upstream.accelerate_and_trainer import call_when_accelerator_is_imported
from hf_moe_ep.upstream.wrap import Feature, Wrap, find_owner, specialise, wrap_process

ROWS = [row for row in (*PROCESS, *OBJECTS) if row.package not in SLOW_TO_IMPORT]
ORIGINAL = object()  # is passed to a wrapper instead of the wrapped function


@pytest.mark.parametrize("wrap", ROWS, ids=lambda wrap: wrap.target)
def test_a_target_resolves_and_its_wrapper_takes_the_same_arguments(wrap: Wrap) -> None:
    owner, name = find_owner(wrap)
    assert callable(getattr(owner, name))
    # If the function is wrapped already, functools.wraps has kept the stock signature.
    stock = inspect.signature(getattr(owner, name))
    ours = inspect.signature(wrap.wrapper)
    for args, kwargs in _list_calls(stock):
        stock.bind(*args, **kwargs)
        ours.bind(ORIGINAL, *args, **kwargs)


def _list_calls(signature: inspect.Signature) -> list[tuple[list[str], dict[str, str]]]:
    """List three calls of a function as (args, kwargs).

    The calls pass the required arguments, all arguments by position, and all arguments by name.
    """
    required, by_position, by_name = [], [], {}
    for name, parameter in signature.parameters.items():
        kind = parameter.kind
        if kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if kind is parameter.KEYWORD_ONLY:
            by_name[name] = name
            continue
        by_position.append(name)
        if parameter.default is parameter.empty:
            required.append(name)
    self_argument, rest = by_position[:1], by_position[1:]  # self is always passed by position
    return [
        (required, {}),
        (by_position, by_name),
        (self_argument, by_name | {name: name for name in rest}),
    ]


@pytest.mark.parametrize("wrap", (*PROCESS, *OBJECTS, *LOADERS), ids=lambda wrap: wrap.target)
def test_the_first_docstring_line_of_a_wrapper_says_why_it_is_wrapped(wrap: Wrap) -> None:
    function = wrap.wrapper.func if isinstance(wrap.wrapper, partial) else wrap.wrapper
    first_line = (function.__doc__ or "").splitlines()[0]
    assert re.fullmatch(r"Wrap .+?: .+\.", first_line)
    assert wrap.why and first_line.endswith(f": {wrap.why}.")


def test_no_target_is_twice_in_the_table() -> None:
    targets = [wrap.target for wrap in (*PROCESS, *OBJECTS)]
    assert len(set(targets)) == len(targets)


def test_the_report_has_every_row_of_the_table() -> None:
    reports = report_wraps()
    assert [report.target for report in reports] == [wrap.target for wrap in ROWS]
    for report, wrap in zip(reports, ROWS, strict=True):
        assert report.resolved and report.error == "", report
        assert report.why == wrap.why
        assert report.process == (wrap in PROCESS)


# The imports of a script that runs in a fresh process.
IMPORTS = {
    "nothing": "",
    "Accelerate": "from accelerate import Accelerator",
    "Trainer": "from transformers import Trainer, TrainingArguments",
    "PEFT": "import peft",
    "TRL": "import trl.models.utils, trl.trainer.callbacks, trl.generation.vllm_generation",
}
OWN_LOOP = """
optimizer = torch.optim.AdamW(model.parameters())
model(**batch(model, 2, 7, seed=0)).loss.backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
"""
SHARDED_LOOP = """
if not torch.distributed.is_initialized():  # the stock model of a later run is not sharded
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = apply_ep_fsdp2(model)
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
model(**batch(model, 2, 7, seed=0)).loss.backward()
optimizer.step()
"""
PREPARE = """
accelerator = Accelerator(cpu=True)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
accelerator.backward(model(**batch(model, 2, 7, seed=0)).loss)
accelerator.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
accelerator.save_state(FOLDER)
"""
TRAIN = """
options = {"use_cpu": True, "max_steps": 1, "save_steps": 1, "report_to": []}
rows = [{k: v[0] for k, v in batch(model, 1, 7, seed=i).items()} for i in range(8)]
trainer = Trainer(model, TrainingArguments(FOLDER, **options), train_dataset=rows)
trainer.train()
trainer.save_model()
"""
ADAPT = """
config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=TARGETS)
model = peft.get_peft_model(model, config)
model(**batch(model, 2, 7, seed=0)).loss.backward()
model.save_pretrained(FOLDER)
"""
# Besides the wraps, patch() changes three things in the namespaces of other packages: it adds the
# switch of the aux loss, a finder that waits for imports, and a module `__getattr__` that waits for
# the use of an Accelerator (only in WAITS).
OTHERS = {
    "transformers.models.qwen3_moe.modeling_qwen3_moe:load_balancing_loss_func",
    "sys:meta_path",
}
WAITS = OTHERS | {
    f"{module}:{name}"
    for module in ("accelerate", "accelerate.accelerator")
    for name in ("Accelerator", "__getattr__")
}
SCRIPTS = {
    # name: (key of IMPORTS, code that uses the model, the number of functions that are wrapped at
    #        the end, the other names that differ from stock)
    "patch and an own loop": ("nothing", OWN_LOOP, 0, WAITS),
    "apply_ep_fsdp2": ("nothing", SHARDED_LOOP, 0, WAITS),
    "Accelerate": ("Accelerate", PREPARE, 3, OTHERS),
    "Trainer": ("Trainer", TRAIN, 10, OTHERS),
    "PEFT": ("PEFT", ADAPT, 2, WAITS),
    "TRL": ("TRL", "", 14, OTHERS),
}
BEGIN = """
import os, sys, tempfile, torch
sys.path.insert(0, "tests")
from support.replaced import collect_functions, find_replaced
from support.tiny_models import batch, tiny
from hf_moe_ep import apply_ep_fsdp2, patch
from hf_moe_ep.upstream.wrap import in_force
FOLDER = tempfile.mkdtemp()
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
KIND = {"num_hidden_layers": 1, "dtype": torch.float32, "output_router_logits": True}
tiny(**KIND)  # imports the model's file

def check(num_wraps, others):
    names = find_replaced(BEFORE)
    assert others <= names.keys(), sorted(names)
    # A wrapped function is counted once, also if several modules have imported it by its name.
    wraps = {id(value) for name, value in names.items() if name not in others}
    assert len(wraps) == len(in_force()) == num_wraps, sorted(names)
"""
BEFORE = "BEFORE = collect_functions()"


def _run(*parts: str) -> str:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BEGIN + "\n".join(parts)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


# Each case starts a process that imports one library.
_CASES = [
    pytest.param(name, first, id=f"{name}, {order}")
    for name in SCRIPTS
    for first, order in ((True, "imported before patch"), (False, "imported after patch"))
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "imported_first"), _CASES)
def test_functions_are_wrapped_when_a_script_needs_them(name: str, imported_first: bool) -> None:
    package, use, num_wraps, others = SCRIPTS[name]
    if name == "TRL":
        pytest.importorskip("trl", minversion="1.16")
    imported, counted = IMPORTS[package], f"{use}\ncheck({num_wraps}, {others})"
    if imported_first:
        no_wraps = "import hf_moe_ep.apply\ncheck(0, set())"
        _run(imported, BEFORE, no_wraps, "model = patch(tiny(**KIND))", counted)
    else:
        _run(BEFORE, f"model = patch(tiny(**KIND))\ncheck(0, {WAITS})", imported, counted)


def test_the_page_has_the_numbers_of_wrapped_functions() -> None:
    numbers = re.findall(r"^\| `[^|]* \| (\d+) \|$", pages.read("docs/upstream.md"), re.MULTILINE)
    assert [int(number) for number in numbers] == sorted([0, *(row[2] for row in SCRIPTS.values())])


@pytest.mark.parametrize(
    "use",
    [
        "from accelerate import Accelerator",
        "from accelerate import *",
        "from accelerate.accelerator import Accelerator",
        "import accelerate.accelerator as a; Accelerator = a.Accelerator",
    ],
)
def test_the_first_use_of_the_class_accelerator_is_noticed(use: str) -> None:
    calls: list[str] = []
    modules = (accelerate, accelerate.accelerator)
    before = [{**vars(module)} for module in modules]
    call_when_accelerator_is_imported(lambda: calls.append(use))
    exec("import accelerate.optimizer; from accelerate import notebook_launcher")
    assert all(report.resolved for report in report_wraps()) and calls == []
    names: dict[str, Any] = {}
    exec(use, names)
    assert calls == [use] and names["Accelerator"] is Accelerator
    assert [{**vars(module)} for module in modules] == before


# Stock objects may call the functions of ours in ALLOWED: a wrapper looks for a patched model,
# finds none and calls the original function.
TRACE = """
import hf_moe_ep
OURS = os.path.dirname(hf_moe_ep.__file__)
called = set()
ALLOWED = {
    # the function around a stock function, and its check of missing features
    "upstream/wrap.py": {"wrapped", "_refuse_missing", "is_specialised"},
    # wrappers that are in force for the whole process
    "integrations/install.py": {
        "prepare_objects", "prepare_model", "create_accelerator", "call_model_init", "train",
        "evaluate", "adopt_trainer", "_wrap_cpu_ranks", "create_adapters", "inject_adapter",
    },
    "integrations/new_adapters.py": {"inject_adapter"},
    "integrations/trainer_checkpoints.py": {"postpone_rotation"},
    # the search for a patched model
    "state.py": {"find_state", "check_is_model"},
    "config.py": {"is_launched_with_fsdp"},
    # the switch of the aux loss, if the model returns router logits
    "moe/aux_loss.py": {"__call__"},
}
def trace(frame, event, arg):
    while frame.f_code.co_name.startswith("<") and frame.f_back is not None:
        frame = frame.f_back  # the function that runs a generator expression
    # Python asks our import finder at every import, of any module.
    if frame.f_code.co_filename.startswith(OURS) and frame.f_code.co_name != "find_spec":
        called.add((os.path.relpath(frame.f_code.co_filename, OURS), frame.f_code.co_name))
    return None
stock = tiny(**KIND)
model = patch(tiny(**KIND))
"""
END_TRACE = """
sys.setprofile(None)
forbidden = {(file, name) for file, name in called if name not in ALLOWED.get(file, ())}
assert not forbidden, forbidden
print(len(called))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "TRL"])
def test_a_stock_model_runs_stock_code_although_another_model_is_patched(name: str) -> None:
    """All calls of our functions are recorded while a stock model is trained and saved.

    A patched model is trained first in the same way, so that all wraps are in force. Afterwards
    only wrappers of the whole process are called, once for each object that is created or prepared.
    """
    package, use, num_wraps, others = SCRIPTS[name]
    counted = f"check({num_wraps}, {others})"
    # `use` runs twice: first with the patched model, then with the stock model as `model`.
    switch_to_stock = "sys.setprofile(trace)\nmodel = stock"
    printed = _run(IMPORTS[package], BEFORE, TRACE, use, counted, switch_to_stock, use, END_TRACE)
    # Without wraps, only the switch of the aux loss is called.
    assert int(printed.split()[-1]) == 1 or num_wraps > 0


STEP = """
loss = model(**batch(model, 2, 7, seed=0)).loss
sys.setprofile(trace)
accelerator.backward(model(**rows).loss)
accelerator.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
optimizer.zero_grad()
accelerator.save_state(FOLDER)
sys.setprofile(None)
assert called == {("moe/aux_loss.py", "__call__")}, called
"""


@pytest.mark.slow
def test_a_step_of_a_stock_model_under_accelerate_calls_nothing_of_ours() -> None:
    """No wrapper, and no check of a wrapper, runs between the forward and save_state."""
    rows = "rows = batch(stock, 2, 7, seed=0)\nmodel = stock"
    _run(IMPORTS["Accelerate"], TRACE, PREPARE, rows, PREPARE, STEP)


class _MyTrainer(Trainer):
    """A user's trainer that overrides a method."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self.called = ["mine"]
        super().save_model(output_dir, _internal_call)


def test_a_method_of_a_user_is_called_before_the_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrapper is called before stock's method, and the class keeps its name."""

    def ours(original: Callable[..., Any], self: Any, *args: Any) -> None:
        self.called.append("ours")
        original(self, *args)

    def stock(self: Any, output_dir: Any = None, _internal_call: bool = False) -> None:
        self.called.append("stock")

    monkeypatch.setattr(Trainer, "save_model", stock)
    wrapped, unwrapped = _MyTrainer.__new__(_MyTrainer), _MyTrainer.__new__(_MyTrainer)
    row = Wrap("transformers.trainer:Trainer.save_model", ours, FEATURE)
    specialise(wrapped, Trainer, [row])
    wrapped.save_model()
    unwrapped.save_model()
    assert wrapped.called == ["mine", "ours", "stock"] and unwrapped.called == ["mine", "stock"]
    assert type(wrapped).__name__ == "_MyTrainer" and isinstance(wrapped, _MyTrainer)


def test_train_builds_a_patched_model_after_a_search_has_released_the_last_one(
    tmp_path: Path,
) -> None:
    """`Trainer.hyperparameter_search` sets the model to None after each trial."""
    trainer = Trainer(
        model_init=lambda: patch(tiny(dtype=torch.float32, num_hidden_layers=1)),
        args=TrainingArguments(tmp_path, use_cpu=True, max_steps=1, save_strategy="no"),
        train_dataset=[{"input_ids": [3, 1, 4], "labels": [3, 1, 4]}],
    )
    first = trainer.train()
    trainer.model = trainer.model_wrapped = None
    assert trainer.train().training_loss == first.training_loss
    assert find_state(trainer.model) is not None


def _ours(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wrap any function: show that it is missing."""
    return original(*args, **kwargs)


FEATURE = Feature("something that needs it")


@pytest.mark.parametrize(
    "target",
    ["transformers.trainer:Trainer.no_such", "transformers.no_such:f", "transformers:NoSuch.f"],
)
def test_a_missing_target_is_named_with_its_feature_and_the_rest_is_wrapped(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = importlib.metadata.version("transformers")
    monkeypatch.setattr(Trainer, "num_tokens", lambda self: 3, raising=False)
    rows = (
        Wrap(target, _ours, FEATURE),
        Wrap("transformers.trainer:Trainer.num_tokens", _ours, FEATURE),
    )
    message = f"{target} is not in transformers {version}.*: something that needs it .*is missing"
    with pytest.warns(UserWarning, match=message):
        wrap_process(rows)
    assert Trainer.num_tokens._hf_moe_ep_wrapper is _ours


def test_a_call_that_uses_a_missing_feature_raises_the_text_of_the_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call that does not use the feature runs the wrapper as before."""
    target = "transformers.trainer:Trainer.num_tokens"
    monkeypatch.setattr(Trainer, "num_tokens", lambda self: 3, raising=False)
    feature = Feature("long runs", {target: lambda trainer: trainer == "long"})
    rows = (
        Wrap(target, lambda original, self: original(self) + 1, FEATURE),
        Wrap("transformers.trainer:Trainer.no_other", _ours, feature),
    )
    with pytest.warns(UserWarning) as warned:
        wrap_process(rows)
    assert Trainer.num_tokens("short") == 4
    with pytest.raises(ImportError, match=r"no_other is not in .* long runs") as raised:
        Trainer.num_tokens("long")
    assert [str(warning.message) for warning in warned] == [str(raised.value)]


@pytest.mark.parametrize("name", [name for name in dir(features) if name.isupper()])
def test_a_feature_is_used_by_targets_of_the_table(name: str) -> None:
    feature = getattr(features, name)
    if isinstance(feature, Feature):
        rows = (*PROCESS, *OBJECTS)
        assert any(wrap.feature is feature for wrap in rows), "no row is of this feature"
        assert set(feature.used_by) <= {wrap.target for wrap in rows}


def _prepare(accelerator: Accelerator, model: nn.Module) -> None:
    accelerator.prepare(model, torch.optim.SGD(model.parameters()))


def _save_state(accelerator: Accelerator, model: nn.Module) -> None:
    _prepare(accelerator, model)
    accelerator.save_state("nowhere")


# name: (the module and function that a rank deletes, the missing feature, a call that uses it)
MISSING: dict[str, tuple[Any, str, str, Callable[[Accelerator, nn.Module], None]]] = {
    "fsdp2_prepare_model": (
        accelerate.accelerator,
        "fsdp2_prepare_model",
        "sharding a patched model in accelerator.prepare",
        _prepare,
    ),
    "_set_model_state_dict": (
        accelerate.utils.fsdp_utils,
        "_set_model_state_dict",
        "checkpoints of a sharded model by Accelerate",
        _save_state,
    ),
}


def _check_without_a_target(name: str, rank: int, world: int) -> None:
    """Without the feature a loop equals stock. A call that uses it raises the warning's text."""
    module, function, feature, use = MISSING[name]
    delattr(module, function)
    message = f"{function} is not in accelerate .*: {feature} "
    with pytest.warns(UserWarning, match=message):
        ours = apply_ep_fsdp2(tiny(dtype=torch.float32), ep_size=2)
    inputs = batch(ours, 2, 7, seed=rank)
    expected = tiny(dtype=torch.float32)(**inputs).loss
    assert_close("loss", ours(**inputs).loss, expected, FP32_BUDGET)
    with launched(), pytest.raises(ImportError, match=message):
        use(Accelerator(cpu=True), patch(tiny(dtype=torch.float32), ep_size=2))


@pytest.mark.parametrize(
    "claim",
    [
        parameter
        for name in MISSING
        for parameter in on_ranks(
            2, {f"without {name}": partial(_check_without_a_target, name)}, alone=True
        )
    ],
)
def test_without_a_target(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


def _check_replacement_after_patch(rank: int, world: int) -> None:
    """Replace the function that shards, as axolotl does, after the patch and for the process."""
    calls = []

    def theirs(accelerator: Accelerator, model: nn.Module) -> nn.Module:
        calls.append(model)
        return model

    with launched():
        model = patch(tiny(dtype=torch.float32), ep_size=2)
        accelerate.accelerator.fsdp2_prepare_model = theirs
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        state = find_state(model)
        assert state is not None and state.meshes is not None and calls == []
        accelerate.accelerator.fsdp2_prepare_model(accelerator, nn.Linear(2, 2))
        assert len(calls) == 1  # only the call with a model that is not patched


@pytest.mark.parametrize(
    "claim",
    on_ranks(2, {"replaced after patch": _check_replacement_after_patch}, alone=True),
)
def test_a_function_that_a_framework_replaces_after_the_patch(found: Found, claim: Check) -> None:
    found.raise_if_failed(claim)


_WITHOUT_PEFT = """
import importlib.util
stock = importlib.util.find_spec
importlib.util.find_spec = lambda name, *args: None if name == "peft" else stock(name, *args)
from hf_moe_ep.integrations.install import report_wraps
patch(tiny(**KIND))
assert "peft" not in sys.modules
absent = [row for row in report_wraps() if not row.resolved]
assert absent and all(row.target.startswith("peft") and not row.error for row in absent)
"""


@pytest.mark.slow
def test_without_peft_all_other_functions_are_wrapped() -> None:
    _run(_WITHOUT_PEFT)
