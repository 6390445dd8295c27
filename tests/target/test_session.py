"""JAX on a described slice: stand-ins behave as arrays do, small values are right, and nothing is left replaced.

JAX itself is the oracle: the same Python runs on the emulated devices of the tests.
"""

from __future__ import annotations

import copy
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax._src.array import ArrayImpl
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from rooftop.core.errors import RooftopError
from rooftop.hardware import Slice
from rooftop.target import private
from rooftop.target.private import NAMES, PrivateName, require_known_jax
from rooftop.target.session import Session, SessionOptions, _Argument, differences
from rooftop.target.standin import StandIn
from rooftop.target.written import jaxpr_of, written_work

#: No jit of these tests is compiled by XLA:TPU.
NEVER = SessionOptions(min_flops=float("inf"))
SLICE = Slice.parse("v5e:2x2")


@pytest.fixture
def session() -> Iterator[Session]:
    with Session(slice=SLICE, options=NEVER) as session:
        yield session


def mesh_of(kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    """Four of the devices that JAX has, those of the slice inside a session."""
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    return jax.sharding.Mesh(devices, ("data", "model"), axis_types=(kind, kind))


# ---- the session ----------------------------------------------------------------------------------------------------


def test_the_slice_is_what_jax_has_and_all_is_as_before_afterwards() -> None:
    before = [(name, _value(name)) for name in NAMES]
    devices, double = jax.devices(), jax.jit(lambda x: 2 * x)
    assert float(double(jnp.float32(3))) == 6
    with Session(slice=SLICE, options=NEVER):
        assert [device.platform for device in jax.devices()] == ["tpu"] * 4
        assert (jax.default_backend(), jax.device_count(), jax.local_device_count()) == ("tpu", 4, 4)
        assert (jax.process_count(), jax.process_index(), len(jax.local_devices())) == (1, 0, 4)
        assert jax.devices("cpu") == devices
        # The jit knows the way to the CPU: it must not take it.
        assert isinstance(double(np.ones((300, 300), np.float32)), StandIn)
    assert jax.devices() == devices
    assert not isinstance(double(jnp.float32(3)), StandIn)
    assert [(name, _value(name)) for name in NAMES if name.module != "xla_bridge"] == [
        (name, value) for name, value in before if name.module != "xla_bridge"
    ]


def _value(name: PrivateName) -> Any:
    value: Any = __import__(f"jax._src.{name.module}", fromlist=["_"])
    for part in name.name.split("."):
        value = getattr(value, part)
    # Registries of types keep that of stand-ins.
    return value if callable(value) and not isinstance(value, type) else None


def test_one_target_at_a_time(session: Session) -> None:
    with pytest.raises(RooftopError, match="one target at a time"):
        Session(slice=Slice.parse("v5e:4x4"), options=NEVER).start()


def test_hosts_are_listed_one_after_the_other() -> None:
    with Session(slice=Slice.parse("v5e:4x4"), options=NEVER):
        corners = [tuple(device.coords[:2]) for device in jax.devices()[:8]]
    assert corners == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]


def test_stand_ins_are_in_every_registry_of_types_that_arrays_are_in(session: Session) -> None:
    missing = []
    for name, module in list(sys.modules.items()):
        for attribute, value in vars(module).items() if name.startswith("jax._src") else ():
            if isinstance(value, dict | set) and ArrayImpl in value and StandIn not in value:
                missing.append(f"{name}.{attribute}")
    assert missing == []


def test_the_installed_jax_is_known() -> None:
    require_known_jax()


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (PrivateName(module="pjit", name="_no_such_name"), "jax._src.pjit._no_such_name is missing"),
        (PrivateName(module="no_such_module", name="x"), "jax._src.no_such_module.x is missing"),
        (PrivateName(module="pjit", name="convert_to_metaty", parameters=("arg", "q")), "does not take q"),
    ],
)
def test_an_unknown_jax_is_refused_in_one_line(name: PrivateName, problem: str) -> None:
    with pytest.raises(
        RooftopError, match=rf"jax: got '[\d.]+'; accepted: a release .*{problem}.* and 1 more\)$"
    ) as no:
        require_known_jax([name, name])
    assert "\n" not in str(no.value)
    assert private.KNOWN in str(no.value)


# ---- which programs are compiled ------------------------------------------------------------------------------------


class Compiling(BaseException):
    """A program is about to be compiled: here it is not."""


def choices(run: Callable[[], object], **options: Any) -> tuple[list[str], dict[str, tuple[str, int]]]:
    """Names of the programs that a session would compile, and the reason and number of those that it leaves out."""
    compiled: list[str] = []

    def stop(name: str) -> None:
        compiled.append(name)
        raise Compiling

    with Session(slice=SLICE, options=SessionOptions(**options), on_compile=stop) as session:
        with suppress(Compiling):
            run()
        return compiled, {item.name: (item.reason, item.count) for item in session.record.not_compiled}


def split(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    """An array whose rows are split over all devices."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    return jax.device_put(jnp.zeros(shape, dtype), NamedSharding(mesh, P("x")))


def over_rows(function: Any) -> Any:
    return jax.shard_map(function, mesh=jax.make_mesh((4,), ("x",), (AxisType.Auto,)), in_specs=P("x"), out_specs=P())


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (lambda: jax.jit(lambda x, at: x[at])(split(64, 8), np.zeros(8, np.int32)), "<lambda>"),
        (lambda: jax.jit(lambda x, at: x.at[at].add(1.0))(split(64, 8), np.zeros(8, np.int32)), "<lambda>"),
        (lambda: jax.jit(optax.adam(1e-3).init)(split(64, 8)), "init_fn"),
        (lambda: jax.jit(jnp.sort)(split(64, 8)), "sort"),
        (lambda: jax.jit(static_argnums=1)(lambda x, n: x * n)(split(64, 8), 2), "<lambda>"),
        (lambda: jax.jit(over_rows(lambda x: jax.lax.psum(x, "x")))(jnp.zeros((64, 8))), "<lambda>"),
        (lambda: jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")(jnp.zeros((4, 8))), "_fun"),
        (lambda: jax.jit(lambda x: x + 1)(jnp.zeros((1 << 18,))), "<lambda>"),
    ],
    ids=["gather", "scatter", "library", "of jax", "decorator", "shard_map", "pmap", "large"],
)
def test_jits_without_a_matmul_are_compiled(run: Callable[[], object], name: str) -> None:
    compiled, left_out = choices(run)
    assert compiled == [name]
    assert {reason for reason, _ in left_out.values()} <= {"operation"}


def test_operations_and_jits_that_make_arrays_are_left_out() -> None:
    """Eager work on split arrays is JAX's own programs; an init takes XLA minutes."""

    def run() -> None:
        x = split(64, 8)
        _ = jnp.sort(x) + jax.random.normal(jax.random.key(0), x.shape).sum()
        _ = jax.jit(lambda key: jax.random.normal(key, (4096, 4096)), out_shardings=x.sharding)(jax.random.key(0))
        _ = over_rows(lambda x: jax.lax.psum(x, "x"))(x)

    compiled, left_out = choices(run)
    assert (compiled, left_out.pop("<lambda>")) == ([], ("small", 1))
    assert {"sort", "add"} <= left_out.keys()
    assert {reason for reason, _ in left_out.values()} == {"operation"}


def test_a_function_is_compiled_a_few_times() -> None:
    """Without a matmul; a step with matmuls is compiled for every shape, as JAX does."""
    compiled: list[str] = []

    def stop(name: str) -> None:
        compiled.append(name)
        raise Compiling

    with Session(slice=SLICE, on_compile=stop) as session:
        for function, rows in ((lambda x: x + 1, 4), (lambda x: x @ x.T, 1024)):
            jitted = jax.jit(function)
            for times in range(1, 21):
                with suppress(Compiling):
                    jitted(split(rows * times, 256))
        (left_out,) = (item for item in session.record.not_compiled if item.reason != "operation")
    assert (left_out.name, left_out.reason, left_out.count) == ("<lambda>", "repeated", 12)
    assert len(compiled) == 8 + 20


def test_a_number_of_flops_is_the_rule() -> None:
    def run() -> None:
        _ = jax.jit(lambda x: x + 1)(split(64, 8))

    compiled, left_out = choices(run, min_flops=1.0)
    assert (compiled, left_out["<lambda>"]) == ([], ("flops", 1))
    assert choices(run, min_flops=0.0)[0] == ["convert_element_type"]


# ---- devices --------------------------------------------------------------------------------------------------------


def test_memory_of_a_device_is_that_of_the_arrays_on_it(session: Session) -> None:
    """The keys are those of a TPU (jax-ml/jax#1491)."""
    device = jax.devices()[0]
    assert device.memory_stats().keys() == {
        "num_allocs", "bytes_in_use", "peak_bytes_in_use", "largest_alloc_size", "bytes_limit", "bytes_reserved",
        "peak_bytes_reserved", "bytes_reservable_limit", "largest_free_block_bytes",
    }  # fmt: skip
    assert device.memory_stats()["bytes_limit"] == SLICE.device_hbm_usable_bytes
    assert device.memory_stats()["bytes_in_use"] == 0
    x = split(1024, 256)
    on_host = jax.device_put(x, x.sharding.with_memory_kind("pinned_host"))
    assert [one.memory_stats()["bytes_in_use"] for one in jax.devices()] == [1024 * 256] * 4
    assert {id(one) for one in jax.live_arrays()} == {id(x), id(on_host)}
    y = jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    assert device.memory_stats()["bytes_in_use"] == 1024 * 256
    assert device.memory_stats()["largest_alloc_size"] == 1024 * 256
    del y
    assert device.memory_stats()["bytes_in_use"] == 0
    assert [one.local_hardware_id for one in jax.devices()] == [0, 1, 2, 3]
    # Local devices answer as ever.
    here = jax.devices("cpu")[1]
    assert (here.memory_stats(), here.local_hardware_id) == (None, 1)


# ---- small values ---------------------------------------------------------------------------------------------------


def _scan() -> Any:
    return jax.lax.scan(lambda carry, x: (carry + x, carry * x), jnp.float32(1), jnp.arange(5.0))


def _updated() -> Any:
    optimizer = optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100))
    params = {"w": jnp.arange(6.0).reshape(2, 3)}
    state = optimizer.init(params)
    for _ in range(3):
        updates, state = optimizer.update(jax.tree.map(jnp.ones_like, params), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


SMALL: dict[str, Callable[[], Any]] = {
    "index": lambda: jnp.arange(10)[3] + 1,
    "item": lambda: jnp.arange(10).sum().item(),
    "slice": lambda: jnp.arange(24).reshape(2, 3, 4)[:, 1, ::2],
    "keys": lambda: jax.random.key_data(jax.random.split(jax.random.key(7), 3)),
    "old keys": lambda: jax.random.fold_in(jax.random.PRNGKey(7), 3),
    "normal": lambda: jax.random.normal(jax.random.fold_in(jax.random.key(1), 5), (4, 4)),
    "scan": _scan,
    "while": lambda: jax.lax.while_loop(lambda x: x < 100, lambda x: x * 3, jnp.int32(1)),
    "cond": lambda: jax.lax.cond(jnp.bool_(True), jnp.sin, jnp.cos, jnp.float32(2)),
    "optimizer": _updated,
    "jitted": lambda: jax.jit(lambda x, y: {"a": x @ y, "b": (x.sum(), 3)})(jnp.ones((3, 4)), jnp.ones((4, 5))),
    "grad": lambda: jax.grad(lambda x: (jnp.tanh(x) ** 2).sum())(jnp.arange(4.0)),
    "at": lambda: jnp.zeros(5).at[2].set(7.0),
    "where": lambda: jnp.where(jnp.arange(4) > 1, jnp.arange(4), -1),
    "constraint": lambda: jax.jit(
        lambda x: jax.lax.with_sharding_constraint(x + 1, NamedSharding(mesh_of(), P("data")))
    )(jnp.arange(8)),
    "explicit": lambda: jax.device_put(jnp.arange(8), NamedSharding(mesh_of(AxisType.Explicit), P("data"))) * 2,
    "callback": lambda: jax.make_array_from_callback(
        (8, 2),
        NamedSharding(mesh_of(), P("data")),
        lambda index: np.arange(16, dtype=np.int32).reshape(8, 2)[index],
    ),
    "process": lambda: jax.make_array_from_process_local_data(
        NamedSharding(mesh_of(), P("data")), np.arange(16, dtype=np.int32).reshape(8, 2)
    ),
    "shards": lambda: jax.device_put(np.arange(8), NamedSharding(mesh_of(), P("data"))).addressable_shards[1].data,
    "donated": lambda: jax.jit(lambda x: x + 1, donate_argnums=0)(jnp.arange(8)),
    "format": lambda: f"{jnp.float32(2.5):.3f} {jnp.arange(3)} {jnp.int32(4)!r} {jnp.int32(4)!s}",
    "iteration": lambda: [int(x) for x in jnp.arange(3)],
    "copies": lambda: copy.deepcopy(jnp.arange(3)) + copy.copy(jnp.arange(3)),
    "numpy": lambda: np.concatenate([np.asarray(jnp.arange(3)), [4]]),
    "block": lambda: jax.block_until_ready(jax.device_get({"x": jnp.arange(3)})),
}


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("name", SMALL)
def test_small_values_are_those_that_jax_computes(name: str) -> None:
    expected = jax.tree.map(np.asarray, SMALL[name]())
    with Session(slice=SLICE, options=NEVER) as session:
        result = SMALL[name]()
        computed = jax.tree.map(np.asarray, result)
    assert jax.tree.structure(computed) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(computed), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype
        if ours.dtype.kind == "f":
            # Compiled as one program, sums may round differently.
            np.testing.assert_allclose(ours, theirs, rtol=1e-5)
        else:
            np.testing.assert_array_equal(ours, theirs)
    assert session.record.reads == {}
    assert session.record.notes == ()


def test_small_results_of_a_large_program_are_known(session: Session) -> None:
    """A counter and a position come out of a step that is never executed."""

    @jax.jit
    def step(w: Any, state: Any) -> Any:
        loss = (w @ w).sum()
        return w - loss, {"count": state["count"] + 1, "longest": (state["tokens"] > 0).sum(-1).max()}, loss

    w, state = jnp.zeros((4096, 4096)), {"count": jnp.int32(0), "tokens": jnp.array([[5, 6, 0], [7, 0, 0]])}
    for _ in range(3):
        w, counts, loss = step(w, state)
        state = state | {"count": counts["count"]}
    assert (int(state["count"]), int(counts["longest"])) == (3, 2)
    assert session.record.reads == {}
    assert float(loss) == 1.0
    assert bool(jnp.isfinite(loss))
    assert list(session.record.reads.values()) == [1]
    assert all(line.startswith("test_session.py:") for line in session.record.reads)


# ---- large arrays ---------------------------------------------------------------------------------------------------


def test_tens_of_billions_of_parameters_need_no_memory(session: Session) -> None:
    """280 GB of weights, made eagerly and then split."""
    sharding = NamedSharding(mesh_of(), P("data", "model"))
    layers = [jax.random.normal(jax.random.key(layer), (8192, 106496)) / 8192**0.5 for layer in range(80)]
    split = jax.device_put(layers, sharding)
    assert sum(layer.size for layer in split) == 80 * 8192 * 106496
    assert {layer.sharding for layer in split} == {sharding}
    assert {layer.addressable_shards[3].data.shape for layer in split} == {(4096, 53248)}


def _shardings(value: Any) -> list[Any]:
    return [
        (leaf.shape, str(leaf.dtype), str(leaf.sharding.spec) if isinstance(leaf.sharding, NamedSharding) else "one")
        for leaf in jax.tree.leaves(value)
    ]


def _large(kind: AxisType) -> tuple[Any, Any]:
    mesh = mesh_of(kind)
    x = jax.device_put(jnp.zeros((512, 256)), NamedSharding(mesh, P("data", "model")))
    return mesh, x


def _within(kind: AxisType, function: Callable[[], Any]) -> Any:
    with jax.set_mesh(mesh_of(kind)):
        return function()


SPLIT: dict[str, Callable[[], Any]] = {
    "elementwise": lambda: _large(AxisType.Auto)[1] * 2 + 1,
    "like": lambda: [jnp.zeros_like(_large(AxisType.Auto)[1]), jnp.ones_like(_large(AxisType.Auto)[1])],
    "explicit": lambda: jnp.sin(_large(AxisType.Explicit)[1]).T,
    "explicit sum": lambda: _large(AxisType.Explicit)[1].sum(0),
    "out_shardings": lambda: (
        lambda mesh, x: jax.jit(lambda x: (x.T, x + 1), out_shardings=(NamedSharding(mesh, P("model")), None))(x)[0]
    )(*_large(AxisType.Auto)),
    "constraint": lambda: (
        lambda mesh, x: jax.jit(
            lambda x: jax.lax.with_sharding_constraint(x @ x.T, NamedSharding(mesh, P(None, "data")))
        )(x)
    )(*_large(AxisType.Auto)),
    "one device": lambda: jnp.zeros((512, 512)) + 1,
    "set mesh": lambda: _within(AxisType.Auto, lambda: [jnp.zeros((512, 512)), jnp.ones((512, 512)) * 2]),
    "set explicit mesh": lambda: _within(AxisType.Explicit, lambda: [jnp.zeros((512, 512)), jnp.arange(8) + 1]),
    "replicated": lambda: jax.jit(lambda x: (x @ x.T, x.sum()))(
        jax.device_put(_large(AxisType.Auto)[1], NamedSharding(mesh_of(), P()))
    ),
    "resharded": lambda: jax.device_put(_large(AxisType.Auto)[1], NamedSharding(mesh_of(), P())),
}


@pytest.mark.parametrize("name", SPLIT)
def test_shardings_of_results_are_those_of_jax(name: str) -> None:
    expected = _shardings(SPLIT[name]())
    with Session(slice=SLICE, options=NEVER):
        assert _shardings(SPLIT[name]()) == expected


#: Functions that every argument is donated to, their arguments as (shape, dtype, axes), and the axes of the results.
DONATIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Any]] = {
    "the same type": (lambda x: x + 1, (((8, 8), jnp.float32, ()),), None),
    "the same shard": (lambda x: x + 1, (((8, 8), jnp.float32, ("data",)),), None),
    "no result of the type": (lambda x: x[:4].astype(jnp.bfloat16), (((8, 8), jnp.float32, ("data",)),), None),
    "a larger shard": (lambda x: x + 1, (((8, 8), jnp.float32, ("data",)),), ()),
    "two for one result": (lambda x, y: x + y, (((8, 8), jnp.float32, ()),) * 2, None),
    "one is not used": (lambda x, y: y + 1, (((8, 8), jnp.float32, ()),) * 2, None),
    "handed through": (lambda x: x, (((8, 8), jnp.float32, ()),), None),
    "a sum": (lambda x: x.sum(), (((8, 8), jnp.float32, ()),), None),
}


def donate(case: str) -> tuple[list[bool], list[str]]:
    """Which arguments are deleted after a call, and what later uses of the first of them say."""
    function, types, result = DONATIONS[case]
    mesh = mesh_of()
    arrays = [jax.device_put(jnp.ones(shape, dtype), NamedSharding(mesh, P(*axes))) for shape, dtype, axes in types]
    out = None if result is None else NamedSharding(mesh, P(*result))
    jitted = jax.jit(function, donate_argnums=tuple(range(len(arrays))), out_shardings=out)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jitted(*arrays)
    uses: tuple[Callable[[jax.Array], object], ...] = (lambda x: x + 1, jax.jit(lambda x: 2 * x), np.asarray, float)
    said = []
    for use in uses if arrays[0].is_deleted() else ():
        with pytest.raises(RuntimeError) as error:
            use(arrays[0] if use is not float else arrays[0][0, 0])
        said.append(str(error.value).partition(" (")[0])
    return [array.is_deleted() for array in arrays], said


@pytest.mark.parametrize("case", DONATIONS)
def test_donated_arrays_are_deleted_as_jax_does(case: str) -> None:
    executed = donate(case)
    with Session(slice=SLICE, options=NEVER):
        assert donate(case) == executed


def test_a_deleted_array_names_the_call_that_it_was_donated_to(session: Session) -> None:
    x = jnp.ones((8, 8))
    jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    with pytest.raises(
        RuntimeError, match=r"deleted with shape=float32\[8,8\]\. \(donated to <lambda> at .*\.py:\d+\)"
    ):
        x.block_until_ready() + 1
    y = jnp.ones((8, 8))
    y.delete()
    with pytest.raises(RuntimeError, match=r"delete\(\)"):
        y + 1


def in_auto_axes() -> list[tuple[Any, ...]]:
    """Axis types of what a function makes in the automatic mode of an explicit mesh, and of its result."""
    with jax.sharding.set_mesh(mesh_of(AxisType.Explicit)):
        inside = list[tuple[Any, ...]]()

        def function(x: jax.Array) -> jax.Array:
            for value in (jnp.ones(8), jax.lax.convert_element_type(4, jnp.int32), jax.jit(lambda x: x * 2)(x)):
                inside.append(jax.typeof(value).sharding.mesh.axis_types)
            return x + 1

        result = jax.sharding.auto_axes(function, out_sharding=P())(jnp.ones(4))
        at = jnp.int32(3)
        row = jnp.ones((4, 8)).at[:, at - 1 : at].get(out_sharding=P(None, None))
        return [*inside, jax.typeof(result).sharding.mesh.axis_types, row.shape]


def test_axis_types_in_auto_axes_are_those_of_jax() -> None:
    executed = in_auto_axes()
    with Session(slice=SLICE, options=NEVER):
        assert in_auto_axes() == executed


def test_shapes_that_do_not_divide_are_refused_as_jax_does() -> None:
    def wrong() -> None:
        jax.device_put(np.zeros((7, 512)), NamedSharding(mesh_of(), P("data")))

    with pytest.raises(ValueError, match="7") as theirs:
        wrong()
    with Session(slice=SLICE, options=NEVER), pytest.raises(ValueError, match="7") as ours:
        wrong()
    assert "divi" in str(theirs.value)
    assert "divi" in str(ours.value)


def test_errors_of_shapes_are_those_of_jax(session: Session) -> None:
    with pytest.raises(TypeError, match="same shape"):
        jax.jit(lambda a, b: a @ b)(jnp.zeros((512, 512)), jnp.zeros((3, 3)))


def test_a_stand_in_has_no_value_outside_of_its_target() -> None:
    with Session(slice=SLICE, options=NEVER):
        x = jnp.zeros((512, 512))
        assert repr(x) == "Array(float32[512,512], on one device, value not computed)"
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(x)
    with pytest.raises(TypeError, match="belongs to a target"):
        jnp.sin(x)


# ---- programs -------------------------------------------------------------------------------------------------------


def _mapped(x: Any) -> Any:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("x",))
    return jax.shard_map(lambda part: part @ part.T, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(x)


@pytest.mark.parametrize(
    ("function", "shapes", "flops"),
    [
        (lambda x, w: x @ w, [(8, 16), (16, 32)], 2 * 8 * 16 * 32),
        (
            lambda x, w: jax.lax.scan(lambda c, _: (c @ w, None), x, None, 5),
            [(8, 16), (16, 16)],
            5 * 2 * 8 * 256,
        ),
        (lambda x: jax.vmap(lambda a: jnp.einsum("ij,kj->ik", a, a))(x), [(3, 8, 16)], 3 * 2 * 8 * 8 * 16),
        (_mapped, [(8, 16)], 4 * 2 * 2 * 2 * 16),
        (jax.value_and_grad(lambda w, x: (x @ w).sum()), [(16, 32), (8, 16)], 2 * 2 * 8 * 16 * 32),
        (jax.checkpoint(lambda x, w: x @ w), [(8, 16), (16, 32)], 2 * 8 * 16 * 32),
        (lambda x: jax.lax.cond(x.sum() > 0, lambda: x @ x, lambda: x), [(8, 8)], 2 * 8 * 8 * 8),
    ],
    ids=["matmul", "scan", "vmap", "shard_map", "grad", "remat", "cond"],
)
def test_flops_as_written(function: Any, shapes: Any, flops: float) -> None:
    traced = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    assert written_work(jaxpr_of(traced)[0]).matmul_flops == flops


def test_flops_of_a_convolution_are_those_that_xla_counts() -> None:
    def convolve(x: Any, w: Any) -> Any:
        return jax.lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 16, 16, 8), (3, 3, 8, 32))]
    counted = jax.jit(convolve).lower(*shapes).compile().cost_analysis()["flops"]
    assert written_work(jaxpr_of(jax.make_jaxpr(convolve)(*shapes))[0]).matmul_flops == counted


def _argument(name: str, **changes: Any) -> _Argument:
    fields: dict[str, Any] = {"name": name, "type": "f32[8]", "sharding": "P()", "committed": True}
    return _Argument(**(fields | changes))


def test_what_differs_between_two_compilations_is_said() -> None:
    last = [_argument(name) for name in "abcde"]
    assert differences(last, last) == ("a static argument, or a value that the function closes over",)
    assert differences(last, last[:3]) == ("3 arguments instead of 5, or others",)
    split = [_argument(name, sharding="P('x')") for name in "abcd"] + [_argument("e", type="f32[4]", committed=False)]
    assert differences(last, split) == (
        "type of 1 argument: e f32[8] -> f32[4]",
        "sharding of 4 arguments: a P() -> P('x'); b P() -> P('x'); c P() -> P('x'), ...",
        "placement of 1 argument: e placed -> not placed",
    )
