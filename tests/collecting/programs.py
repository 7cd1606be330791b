"""Programs that do something with their model while it is collected; each prints what came out."""

from __future__ import annotations

import copy
import io
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

Program = Callable[[nn.Sequential, Tensor], object]


def deepcopy(model: nn.Sequential, x: Tensor) -> object:
    twin = copy.deepcopy(copy.deepcopy(model))
    twin(x).sum().backward()
    return model(x) - twin(x)


def shallow_copy(model: nn.Sequential, x: Tensor) -> object:
    return copy.copy(model)(x)


def averaged(model: nn.Sequential, x: Tensor) -> object:
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    return average(x)


def save_the_model(model: nn.Sequential, x: Tensor) -> object:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)(x)


def state_dict(model: nn.Sequential, x: Tensor) -> object:
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    return [*model.state_dict()], model(x)


def trace(model: nn.Sequential, x: Tensor) -> object:
    traced = torch.jit.trace(model, x)
    torch.jit.save(traced, io.BytesIO())
    return str(traced.inlined_graph).count("aten::"), traced(x), model(x)


def script(model: nn.Sequential, x: Tensor) -> object:
    def twice(y: Tensor) -> Tensor:
        return y * 2

    @torch.jit.script
    def fourfold(y: Tensor) -> Tensor:
        return twice(twice(y))  # a name of this frame, which the compiler looks up

    return fourfold(torch.jit.script(model)(x)), model(x)


def export(model: nn.Sequential, x: Tensor) -> object:
    graph = torch.export.export(model, (x,)).graph
    return [str(node.target) for node in graph.nodes], model(x)


def symbolic_trace(model: nn.Sequential, x: Tensor) -> object:
    return torch.fx.symbolic_trace(model)(x), model(x)


def compiled(model: nn.Sequential, x: Tensor) -> object:
    return torch.compile(model, backend="eager")(x)


def compiled_in_place(model: nn.Sequential, x: Tensor) -> object:
    model.compile(backend="eager")
    return model(x)


def compiled_from_outside(model: nn.Sequential, x: Tensor) -> object:
    @torch.compile(backend="eager")
    def loss() -> Tensor:
        return model(x).sum()

    return loss()


def checkpointed(model: nn.Sequential, x: Tensor) -> object:
    from torch.utils.checkpoint import checkpoint

    x.requires_grad_()
    for use_reentrant in (True, False):
        checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
    return x.grad


def functional(model: nn.Sequential, x: Tensor) -> object:
    def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (row,)).sum()

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    per_row = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    return per_row["0.weight"]


def threads(model: nn.Sequential, x: Tensor) -> object:
    outcomes: list[str] = []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        try:
            for _ in range(40):
                model(x).sum().backward()
        except BaseException as error:
            outcomes.append(repr(error))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return outcomes


def forked(model: nn.Sequential, x: Tensor) -> object:
    """A child calls the model; it has no thread that could write."""
    child = os.fork()
    if child == 0:
        for _ in range(50):
            model(x)
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), model(x)


def on_meta(model: nn.Sequential, x: Tensor) -> object:
    twin = copy.deepcopy(model).to("meta")
    return tuple(twin(x.to("meta")).shape), model(x)


def _group() -> None:
    file = Path(f"store-{os.getpid()}").resolve()
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)


def ddp(model: nn.Sequential, x: Tensor) -> object:
    _group()
    wrapped = nn.parallel.DistributedDataParallel(model)
    wrapped(x).sum().backward()
    return model[0].weight.grad


def fsdp2(model: nn.Sequential, x: Tensor) -> object:
    from torch.distributed.fsdp import fully_shard

    _group()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=torch.distributed.init_device_mesh("cpu", (1,)))  # type: ignore[arg-type]
    model(x).sum().backward()
    return model[0].weight.grad.full_tensor()  # type: ignore[union-attr]


def changed(model: nn.Sequential, x: Tensor) -> object:
    """A layer is replaced, another dtype is taken, and a call fails in between."""
    model[2] = nn.Linear(4, 2)
    try:
        model(x[:, :3])
    except RuntimeError as error:
        return str(error), model.double()(x.double())


def exits_with_a_status(model: nn.Sequential, x: Tensor) -> object:
    model(x)
    sys.exit(5)


def exits_with_a_list(model: nn.Sequential, x: Tensor) -> object:
    model(x)
    sys.exit([1, 2])


def ends_at_once(model: nn.Sequential, x: Tensor) -> object:
    model(x)
    sys.stdout.flush()
    os._exit(6)


PROGRAMS: dict[str, Program] = {
    program.__name__: program
    for program in (
        deepcopy, shallow_copy, averaged, save_the_model, state_dict, trace, script, export,
        symbolic_trace, compiled, compiled_in_place, compiled_from_outside, checkpointed,
        functional, threads, forked, on_meta, ddp, fsdp2, changed, exits_with_a_status,
        exits_with_a_list, ends_at_once,
    )
}  # fmt: skip


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    if not sys.argv[1].startswith("compiled"):  # whose first call has to be the compiled one
        print(model(x).sum())
    print(PROGRAMS[sys.argv[1]](model, x))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
