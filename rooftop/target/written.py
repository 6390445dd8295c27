"""Facts that stand in a traced program, before it is compiled: matmul FLOPs, kernels, shardings of its results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax._src import config, core
from jax._src.named_sharding import UnspecifiedValue
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

#: Equations of the longest program that is taken for elementwise work, if XLA is not asked.
_SHORT = 8
#: Primitives that give their result a sharding.
_CONSTRAINTS = frozenset({"sharding_constraint", "reshard", "mesh_cast"})


def jaxpr_of(program: Any) -> tuple[Any, Sequence[Any]]:
    """A jaxpr and the values of its constants, which may stand apart from it."""
    return getattr(program, "jaxpr", program), getattr(program, "consts", ())


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    """The jaxprs in the parameters of an equation."""
    for inner in core.jaxprs_in_params(equation.params):
        yield jaxpr_of(inner)[0]


@dataclass(frozen=True, kw_only=True)
class WrittenWork:
    """Work that a program asks for, over all devices: ``matmul_flops`` outside of kernels, and Pallas ``kernels``.

    The body of a loop counts as often as the program says; of a ``while`` loop it counts once. ``devices`` are those of
    its largest ``shard_map``.
    """

    matmul_flops: float = 0.0
    kernels: int = 0
    devices: int = 1


def written_work(jaxpr: Any) -> WrittenWork:
    """The work of a jaxpr."""
    flops, kernels, devices = 0.0, 0, 1
    for equation in jaxpr.eqns:
        name, times = equation.primitive.name, 1
        if name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            flops += 2.0 * _size(equation.outvars[0].aval) * math.prod(left[dim] for dim in contracted)
            continue
        if name == "conv_general_dilated":
            # The kernel's output features are not summed over.
            kernel, numbers = equation.invars[1].aval, equation.params["dimension_numbers"]
            flops += 2.0 * _size(equation.outvars[0].aval) * _size(kernel) / kernel.shape[numbers.rhs_spec[0]]
            continue
        if name == "pallas_call":
            kernels += 1
            continue
        if name == "scan":
            times = equation.params["length"]
        elif name == "shard_map":
            times = _manual_devices(equation.params)
            devices = max(devices, times)
        branches = [written_work(inner) for inner in inner_jaxprs(equation)]
        if name == "cond":
            branches = [max(branches, key=lambda work: (work.matmul_flops, work.kernels))]
        flops += times * sum(work.matmul_flops for work in branches)
        kernels += sum(work.kernels for work in branches)
        devices = max([devices, *(work.devices for work in branches)])
    return WrittenWork(matmul_flops=flops, kernels=kernels, devices=devices)


def _manual_devices(params: dict[str, Any]) -> int:
    """The number of devices that a ``shard_map`` runs on, each with its own part."""
    sizes, axes = dict(params["mesh"].shape), params.get("manual_axes")
    return math.prod(size for name, size in sizes.items() if axes is None or name in axes)


def _size(aval: Any) -> int:
    return math.prod(aval.shape)


def bytes_of(avals: Iterable[Any]) -> int:
    """Bytes of whole arrays."""
    return sum(_size(aval) * int(getattr(aval.dtype, "itemsize", 4)) for aval in avals if hasattr(aval, "shape"))


def result_shardings(
    jaxpr: Any, arguments: Sequence[Any], in_shardings: Sequence[Any], out_shardings: Sequence[Any], context: Mesh
) -> list[Sharding | None]:
    """The sharding of each result of a program as far as it follows without XLA; None where it does not.

    It follows from ``out_shardings``, explicit types and constraints, and if no argument is split. Short programs
    without any of them are elementwise: a result is split as an argument of its shape.
    """
    context = _as_set(context)
    inside = _constraints(jaxpr)
    placed: list[Any] = [value.sharding for value in arguments if getattr(value, "committed", False)]
    placed += [sharding for sharding in (*in_shardings, *out_shardings, *inside) if isinstance(sharding, Sharding)]
    meshes = [s.mesh for s in placed if isinstance(s, NamedSharding) and isinstance(s.mesh, Mesh) and not s.mesh.empty]
    # Of one-device meshes and larger ones, results lie on the larger.
    mesh = max(meshes, key=lambda item: item.size, default=None if context.empty else context)
    by_shape: dict[tuple[int, ...], Sharding] = {}
    for value in arguments:
        if isinstance(value, jax.Array) and value.sharding.num_devices > 1:
            by_shape.setdefault(value.shape, value.sharding)
    spread = bool(by_shape) or any(sharding.num_devices > 1 for sharding in placed if _is_concrete(sharding))
    arrays = [value.sharding for value in arguments if isinstance(value, jax.Array)]
    whole = all(sharding.is_fully_replicated for sharding in arrays) and not any(
        isinstance(sharding, Sharding) for sharding in (*in_shardings, *out_shardings, *inside)
    )
    shardings: list[Sharding | None] = []
    for variable, stated, inner in zip(jaxpr.outvars, out_shardings, inside, strict=True):
        aval = variable.aval
        typed = getattr(aval, "sharding", None)
        sharding: Sharding | None = None
        if stated is not None and not isinstance(stated, UnspecifiedValue):
            sharding = stated
        elif typed is not None and not typed.mesh.empty and typed.mesh.are_all_axes_explicit:
            sharding = typed
        elif inner is not None:
            sharding = inner
        elif whole:
            # Nothing is split, and nothing asks for it.
            sharding = _one_device(placed) if mesh is None else NamedSharding(mesh, PartitionSpec())
        elif spread and len(jaxpr.eqns) < _SHORT:
            sharding = by_shape.get(aval.shape)
        shardings.append(_concrete(sharding, typed, mesh))
    return shardings


def donated(
    jaxpr: Any, arguments: Sequence[Any], shardings: Sequence[Sharding], donates: Sequence[bool]
) -> tuple[int, ...]:
    """Positions of the donated arguments whose memory a result takes, one of the same type and shard: they are deleted.

    XLA may also reuse the memory of an argument of another type with as many bytes; such an argument is left out here.
    """
    used = {variable for equation in jaxpr.eqns for variable in equation.invars if type(variable) is core.Var}
    used |= {variable for variable in jaxpr.outvars if type(variable) is core.Var}
    waiting: dict[Any, list[int]] = {}
    for at, (variable, value, donates_it) in enumerate(zip(jaxpr.invars, arguments, donates, strict=True)):
        if donates_it and variable in used and isinstance(value, jax.Array):
            waiting.setdefault(_shard_type(variable.aval, value.sharding), []).append(at)
    taken = []
    for variable, sharding in zip(jaxpr.outvars, shardings, strict=True):
        same = waiting.get(_shard_type(variable.aval, sharding))
        if same:
            taken.append(same.pop(0))
    return tuple(taken)


def _shard_type(aval: Any, sharding: Sharding) -> tuple[Any, ...]:
    return aval.shape, aval.dtype, sharding.shard_shape(aval.shape), sharding.memory_kind


def _as_set(context: Mesh) -> Mesh:
    """The mesh that is set, with the axis types of the part of the program that is running (``auto_axes``)."""
    abstract = jax.sharding.get_abstract_mesh()
    if context.empty or abstract.shape != context.abstract_mesh.shape or abstract.axis_types == context.axis_types:
        return context
    return Mesh(context.devices, context.axis_names, axis_types=abstract.axis_types)


def replicated(arguments: Sequence[Any], shardings: Sequence[Sharding | None]) -> Sharding:
    """A sharding that gives every device of a program everything."""
    known = [*(getattr(value, "sharding", None) for value in arguments), *shardings]
    meshes = [s.mesh for s in known if isinstance(s, NamedSharding) and isinstance(s.mesh, Mesh)]
    if meshes:
        return NamedSharding(max(meshes, key=lambda item: item.size), PartitionSpec())
    return _one_device([sharding for sharding in known if sharding is not None])


def _one_device(placed: Sequence[Any]) -> Sharding:
    """The device of a program that is not spread: that of its arguments, else the default one."""
    for sharding in placed:
        if _is_concrete(sharding):
            return jax.sharding.SingleDeviceSharding(min(sharding.device_set, key=lambda device: device.id))
    default: Any = config.default_device.value
    device = default if default is not None and not isinstance(default, str) else jax.devices()[0]
    return jax.sharding.SingleDeviceSharding(device)


def _is_concrete(sharding: Any) -> bool:
    return not isinstance(sharding, NamedSharding) or isinstance(sharding.mesh, Mesh)


def _concrete(sharding: Sharding | None, typed: Any, mesh: Mesh | None) -> Sharding | None:
    """The sharding over devices, with the axis types of the result; None without a mesh of its axes."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    if not isinstance(sharding.mesh, Mesh):
        if mesh is None or dict(mesh.shape) != dict(sharding.mesh.shape):
            return None
        sharding = NamedSharding(mesh, sharding.spec)
    types = typed.mesh.axis_types if typed is not None and not typed.mesh.empty else sharding.mesh.axis_types
    if types != sharding.mesh.axis_types and len(types) == len(sharding.mesh.axis_names):
        alike = Mesh(sharding.mesh.devices, sharding.mesh.axis_names, axis_types=types)
        sharding = NamedSharding(alike, sharding.spec)
    return sharding


def _constraints(jaxpr: Any) -> list[Any]:
    """The sharding that the program itself gives to each of its results; None where it does not."""
    placed: dict[Any, Any] = {}
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in _CONSTRAINTS:
            placed[equation.outvars[0]] = equation.params.get("sharding", equation.params.get("dst_sharding"))
        elif name in ("jit", "pjit"):
            inner, _ = jaxpr_of(equation.params["jaxpr"])
            placed |= dict(zip(equation.outvars, _constraints(inner), strict=True))
        elif name in ("optimization_barrier", "copy"):
            pairs = zip(equation.invars, equation.outvars, strict=True)
            placed |= {
                result: placed[operand] for operand, result in pairs if type(operand) is core.Var and operand in placed
            }
    return [None if type(variable) is core.Literal else placed.get(variable) for variable in jaxpr.outvars]
