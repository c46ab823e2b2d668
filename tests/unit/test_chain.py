"""Modules as chains of layers and tasks as recorded: what a trace does not see by itself."""

from __future__ import annotations

import random
import threading

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from spindle.errors import GuardError, WorkloadError  # noqa: E402
from spindle.models import chain_of  # noqa: E402
from spindle.train import module, probe, record, task, trace_all  # noqa: E402
from spindle.train.record import cut_all, record_all  # noqa: E402
from zoo import WIDTH, Optional, Residual, Tower  # noqa: E402


def assert_same(actual, expected) -> None:
    assert torch.equal(actual, expected)
    weights = [parameter for parameter in ONE.parameters() if parameter.requires_grad]
    gradients = [torch.autograd.grad(value.sum(), weights, allow_unused=True) for value in (actual, expected)]
    for mine, yours in zip(*gradients, strict=True):
        assert (mine is None) == (yours is None)
        assert mine is None or torch.equal(mine, yours)


ONE = Tower(WIDTH, WIDTH, 2).double()
HANDLE = module("one", ONE)
X = torch.randn(3, WIDTH, dtype=torch.float64)


class Forward(Tower):
    """A tower with another forward."""

    def __init__(self, forward) -> None:
        super().__init__(WIDTH, WIDTH, 3)
        self.function = forward

    def forward(self, x, *args, flag=False, **kwargs):
        return self.function(self, x, *args, flag=flag, **kwargs)


def test_a_sequential_with_a_forward_of_its_own_is_no_chain_of_its_children():
    whole = Residual(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()
    assert len(chain_of(whole, X).layers) == 1
    assert torch.equal(chain_of(whole, X)(X), whole(X))


def test_hooks_keep_a_module_whole():
    whole = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()
    whole.register_forward_hook(lambda module, args, output: output * 2)
    assert "it has hooks" in chain_of(whole, X).reason
    assert torch.equal(chain_of(whole, X)(X), whole(X))


def test_a_forward_that_draws_between_its_blocks_is_not_traced_once_for_all():
    def dropping(self, x, flag):
        for block in self.blocks:
            x = x if random.random() < 0.5 else block(x)
        return x

    assert "draws random numbers with Python or numpy" in chain_of(Forward(dropping).double(), X).reason


def test_a_forward_that_makes_tensors_and_takes_remainders_of_sizes_between_its_blocks_is_cut():
    def shuffled(self, x, flag):
        for block in self.blocks:
            if x.shape[1] % 0.5 != 0:
                raise ValueError("sizes must be divisible by 0.5")
            x = block(x * torch.tensor([2.0], dtype=x.dtype, device=x.device))
        return x

    whole = Forward(shuffled).double()
    chain = chain_of(whole, X)
    assert chain.reason == ""
    assert torch.equal(chain(X), whole(X))


def test_a_forward_that_switches_autocast_and_gradients_is_cut():
    def halved(self, x, flag):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.blocks[0](x) @ torch.eye(WIDTH)
            with torch.no_grad():
                y = self.blocks[1](x) * 2
            with torch.autocast("cpu", enabled=False):
                return self.blocks[2](x.float() + y)

    whole = Forward(halved)
    x = X.float()
    chain = chain_of(whole, x)
    assert len(chain.layers) == 3, chain.reason
    assert torch.equal(chain(x), whole(x))
    weights = list(whole.blocks.parameters())
    gradients = [torch.autograd.grad(module(x).sum(), weights, allow_unused=True) for module in (chain, whole)]
    for ours, theirs in zip(*gradients, strict=True):
        assert theirs is None if ours is None else torch.equal(ours, theirs)
    assert gradients[0][2] is not None
    assert gradients[0][6] is None


def test_a_chain_follows_the_flags_of_its_call():
    def flagged(self, x, flag):
        for block in self.blocks:
            x = block(x) if flag else x * block(x)
        return x

    whole = Forward(flagged).double()
    for flag in (False, True):
        chain = chain_of(whole, X, flag=flag)
        assert len(chain.layers) == (3 if flag else 4)
        assert torch.equal(chain(X, flag=flag), whole(X, flag=flag))


def test_a_chain_takes_any_number_of_tensors():
    def summed(self, x, *args, flag):
        for block in self.blocks:
            x = block(x) + sum(args)
        return x

    whole = Forward(summed).double()
    chain = chain_of(whole, X, X, X)
    assert len(chain.layers) == 4
    assert torch.equal(chain(X, X, X + 1), whole(X, X, X + 1))
    with pytest.raises(WorkloadError, match="was recorded with arguments of a different structure"):
        chain(X, X)


def test_calls_with_and_without_a_mask_have_layers_of_their_own():
    handle = module("maybe", Optional().double())
    mask = torch.ones(3, 2, dtype=torch.bool)

    @task(batch_size=3)
    def both(batch):
        return handle(batch["x"], batch["kept"]).sum() + handle(batch["x"]).sum()

    batch = {"x": torch.randn(3, 2, WIDTH, dtype=torch.float64), "kept": mask}
    (recorded,) = cut_all(record_all([both], {"both": batch}), {"both": batch})
    given, left_out = recorded.calls
    assert given.chain is not left_out.chain
    assert len(given.chain.layers) == len(left_out.chain.layers) == 4
    assert torch.equal(given.chain(batch["x"], mask), handle.module(batch["x"], mask))
    assert torch.equal(left_out.chain(batch["x"]), handle.module(batch["x"]))


def traced_alone(whole, batch):
    handle = module("one", whole)

    @task(batch_size=3)
    def alone(batch):
        return handle(batch["x"]).square().mean()

    (traced,) = trace_all([alone], {"alone": batch})
    return handle, traced


def test_a_module_whose_code_depends_on_the_number_of_samples_stays_whole():
    def counted(self, x, flag):
        for block in self.blocks:
            x = block(x) / int(x.shape[0])
        return x

    handle, traced = traced_alone(Forward(counted).double(), {"x": X})
    assert "depends on the number of samples" in handle.chain.reason
    assert not traced.whole_only


def test_a_module_stays_whole_when_asked_to():
    handle = module("one", Tower(WIDTH, WIDTH, 3).double(), split=False)
    chain, _ = handle.cut((X,), {})
    assert len(chain.layers) == 1
    assert chain.reason == ""


def test_a_batch_that_would_lead_another_way_is_refused():
    def longer(self, x, flag):
        for block in self.blocks:
            x = block(x) if x.shape[1] < 8 else block(x) * 2
        return x

    whole = Forward(longer).double()
    chain = chain_of(whole, torch.randn(3, 5, WIDTH, dtype=torch.float64))
    x = torch.randn(2, 7, WIDTH, dtype=torch.float64)
    assert torch.equal(chain(x), whole(x))
    with pytest.raises(WorkloadError, match=r"recorded for sizes with \(a0.shape\[1\] < 8\), which does not hold"):
        chain(torch.randn(3, 9, WIDTH, dtype=torch.float64))


def test_what_recording_misses_is_found_by_comparing_with_the_whole_module():
    hidden = [1.0]

    def changing(self, x, flag):
        for block in self.blocks:
            x = block(x) * hidden[0]
        hidden[0] += 1
        return x

    _, traced = traced_alone(Forward(changing).double(), {"x": X})
    with pytest.raises(WorkloadError, match=r"gives different results layer by layer than as a whole.*split=False"):
        probe([traced], {"alone": {"x": X}})


def test_entries_that_are_put_together_again_may_be_of_any_number():
    def apart(self, x, flag):
        for block in self.blocks:
            x = torch.stack(list(block(x)))
        return torch.cat(list(x), dim=-1)

    whole = Forward(apart).double()
    chain = chain_of(whole, torch.randn(3, 5, WIDTH, dtype=torch.float64))
    x = torch.randn(2, 4, WIDTH, dtype=torch.float64)
    assert len(chain.layers) == 4
    assert torch.equal(chain(x), whole(x))


def test_calls_that_lead_through_different_layers_keep_a_module_whole():
    def shorter(self, x, flag):
        for block in list(self.blocks)[flag:]:
            x = block(x)
        return x

    handle = module("shorter", Forward(shorter).double())

    @task(batch_size=3)
    def both(batch):
        return handle(batch["x"], flag=True).sum() + handle(batch["x"]).sum()

    (recorded,) = cut_all(record_all([both], {"both": {"x": X}}), {"both": {"x": X}})
    for call, flag in zip(recorded.calls, (True, False), strict=True):
        assert "run different layers" in call.chain.reason
        assert torch.equal(call.chain(X, flag=flag), handle.module(X, flag=flag))


def run_recorded(function, batch):
    (recorded,) = cut_all([record(task(batch_size=3, name="one")(function), batch)], {"one": batch})
    outputs: dict = {}
    for call in recorded.calls:
        args, kwargs = call.arguments(batch, *(outputs[source] for source in call.sources))
        outputs[call.name] = call.chain(*args, **kwargs)
    return recorded.loss(batch, *(outputs[source] for source in recorded.loss_sources))


def without_gradient(batch):
    with torch.no_grad():
        target = HANDLE(batch["x"]) * 2
    return (HANDLE(batch["x"]) - target).square().mean()


def written_over(batch):
    y = HANDLE(batch["x"]) * 3
    z = y + 1
    y.clamp_(max=0.5)
    return (F.leaky_relu(y, inplace=True) * z).mean()


def with_constants(batch):
    return (HANDLE(batch["x"]) * torch.linspace(0, 1, WIDTH, dtype=torch.float64)).mean()


@pytest.mark.parametrize("function", [without_gradient, written_over, with_constants])
def test_a_recorded_task_has_the_gradients_of_the_function(function):
    assert_same(run_recorded(function, {"x": X}), function({"x": X}))


def with_entries(batch):
    mask = torch.zeros(3, WIDTH, dtype=torch.float64)  # of the script: what is written now is not part of a step
    mask[0] = batch["x"][0]
    return (HANDLE(batch["x"]) * mask).mean()


def with_out(batch):
    total = torch.zeros(3, WIDTH, dtype=torch.float64)
    torch.add(batch["x"], 1, out=total)
    return (HANDLE(batch["x"]) * total).mean()


@pytest.mark.parametrize(
    "function",
    [
        lambda batch: HANDLE(batch["x"].mul_(2)).mean(),
        lambda batch: HANDLE(batch["x"])[:, 0].relu_().mean(),
        with_entries,
        with_out,
    ],
)
def test_a_task_that_writes_over_what_others_share_is_refused(function):
    with pytest.raises(WorkloadError, match="it changes a tensor in place"):
        record(task(batch_size=3, name="writes")(function), {"x": X})


def test_tracing_leaves_running_statistics_alone():
    norm = module("norm", nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).double())

    @task(batch_size=3)
    def normal(batch):
        return norm(batch["x"]).square().mean()

    before = {name: value.clone() for name, value in norm.module.state_dict().items()}
    trace_all([normal], {"normal": {"x": X}})
    assert all(torch.equal(value, before[name]) for name, value in norm.module.state_dict().items())


def test_an_int_that_is_a_key_is_the_same_for_every_batch():
    factors = {2: 1.0, 3: 10.0}

    def forward(self, x, number, flag):
        x = x * factors[number]
        for block in self.blocks:
            x = block(x)
        return x

    tower = Forward(forward).double()
    chain = chain_of(tower, X, 2)
    assert len(chain.layers) > 1
    assert torch.equal(chain(X, 2), tower(X, 2))
    with pytest.raises(GuardError, match=r"recorded with 2 .* now gets 3: .* spindle.module\(..., split=False\)"):
        chain(X, 3)
    handle = module("keyed", tower)
    given = task(name="given", batch_size=3)(lambda batch: handle(batch, 2).mean())
    trace_all([given], {"given": X})
    assert len(handle.chain.layers) > 1


@pytest.mark.parametrize("axis", [0, 1])
def test_a_size_that_is_a_key_may_differ_from_batch_to_batch(axis):
    factors = {number: float(number) for number in range(20)}

    def forward(self, x, size, flag):
        for block in self.blocks:
            x = block(x)
        return x * factors[size]

    tower = Forward(forward).double()
    handle = module("sized", tower)
    sized = task(name="sized", batch_size=3)(lambda batch: handle(batch, batch.shape[axis]).mean())
    longer = torch.randn(3, 5, WIDTH, dtype=torch.float64)
    (traced,) = trace_all([sized], {"sized": longer})
    assert "takes a size of the batch for a constant" in handle.chain.reason
    assert not traced.whole_only
    shorter = longer[:2, :3]
    (output,) = handle.chain.layers[0].run(shorter, shorter.shape[axis])
    assert torch.equal(output, tower(shorter, shorter.shape[axis]))


@pytest.mark.parametrize(
    "write",
    [lambda mask, other: torch.mul(mask, other, out=mask), lambda mask, other: mask[:, :1].mul_(other)],
    ids=["out", "view"],
)
@pytest.mark.parametrize("reads_values", [False, True])
def test_writes_between_blocks_are_part_of_a_chain(write, reads_values):
    def masked(self, x, flag):
        mask = torch.ones(x.shape[0], 1, dtype=x.dtype)
        write(mask, torch.zeros(x.shape[0], 1, dtype=x.dtype))
        if reads_values and mask.all():
            x = x * 2
        for block in self.blocks:
            x = block(x * mask)
        return x

    tower = Forward(masked).double()
    chain = chain_of(tower, X)
    assert reads_values or chain.reason == ""
    assert torch.equal(chain(X[:2]), tower(X[:2]))


def test_the_reason_names_the_line_of_a_script_in_a_folder_called_spindle():
    script = "def forward(self, x, flag):\n    return x if x.sum() > 0 else self.blocks[0](x)\n"
    names = {}
    exec(compile(script, "/home/someone/spindle/train.py", "exec"), names)
    assert "(train.py, line 2:" in chain_of(Forward(names["forward"]).double(), X).reason


def test_a_chain_follows_a_module_whose_buffers_are_replaced():
    class Shifted(Tower):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH, 2)
            self.register_buffer("shift", torch.ones(WIDTH))

        def forward(self, x):
            for block in self.blocks:
                x = block(x + self.shift)
            return x

    block = Shifted()
    chain = chain_of(block, X.float())
    block.double()  # as moving it to a device does
    assert len(chain.layers) > 1
    values = (X,)
    for layer in chain.layers:
        values = layer.run(*values)
    assert torch.equal(values[0], block(X))


def test_tensors_that_a_block_keeps_to_itself_do_not_keep_it_from_being_cut():
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self._mask, self._nothing = nn.Linear(WIDTH, WIDTH), torch.ones(WIDTH), []

        def forward(self, x):
            return self.linear(x) * self._mask

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Masked() for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    assert len(chain_of(Stack(), X.float()).layers) == 3


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Meanwhile(nn.Module):
    """Does something else between its blocks: in another thread, or here."""

    def __init__(self, meanwhile) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.meanwhile = meanwhile

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            self.meanwhile()
        return x


def test_recording_leaves_modules_and_functions_of_other_threads_alone():
    call, apply, length = nn.Module.__call__, torch.autograd.Function.__dict__["apply"], torch.Tensor.__len__
    head, x = nn.Linear(WIDTH, 1), torch.ones(5, WIDTH)
    expected, outputs = 2 * head(x), []

    def meanwhile():
        assert nn.Module.__call__ is call
        if len(outputs) < 3:  # as often as it has blocks; the chain does not run this again
            thread = threading.Thread(target=lambda: outputs.append((Doubled.apply(head(x)), len(x))))
            thread.start()
            thread.join()

    chain = chain_of(Meanwhile(meanwhile), x)
    assert len(chain.layers) == 3, chain.reason
    assert len(outputs) == 3
    assert all(torch.equal(output, expected) and count == 5 for output, count in outputs)
    assert torch.autograd.Function.__dict__["apply"] is apply
    assert torch.Tensor.__len__ is length
    assert not any("_compiled_call_impl" in vars(part) for part in chain.module.modules())


def test_a_module_is_recorded_while_another_is_recorded():
    x = torch.ones(5, WIDTH)
    inner = []

    def meanwhile():
        if not inner:
            inner.append(None)
            inner[0] = chain_of(Tower(WIDTH, WIDTH, 2), torch.ones(5, WIDTH))

    chain = chain_of(Meanwhile(meanwhile), x)
    assert len(chain.layers) == 3, chain.reason
    assert len(inner[0].layers) > 1


def test_two_threads_record_modules_at_the_same_time():
    towers = [Tower(WIDTH, WIDTH, 3) for _ in range(4)]
    x = torch.ones(5, WIDTH)
    chains: dict[int, object] = {}

    def record_tower(number):
        chains[number] = chain_of(towers[number], x)

    threads = [threading.Thread(target=record_tower, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = {len(chain.layers) for chain in chains.values()}
    assert len(chains) == 4
    assert counts == {len(chain_of(Tower(WIDTH, WIDTH, 3), x).layers)}
    assert all(torch.equal(chains[number](x), tower(x)) for number, tower in enumerate(towers))
