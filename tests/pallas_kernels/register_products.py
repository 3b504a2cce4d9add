"""Products of a warpgroup's registers in JAX's simulator, which has none: `wgmma` with its first
factor in registers, and `pl.run_state`, which gives it sums to add to.

A stand-in for tests. It multiplies at once, as the simulator does with factors in shared memory.
With `run_state` it does what JAX's lowering does: the references that it makes become values. What
products read of shared memory is searched for races, which the simulator leaves out.
"""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels import mosaic_products


def install(monkeypatch) -> None:
    """From now on the simulator has these products, and kernels use them in it."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret

    plain = jaxpr_interpret.JaxprInterpreter.interpret

    def interpret(self, jaxpr, token, *args):
        if not any(eqn.primitive.name in RULES for eqn in jaxpr.eqns):
            return plain(self, jaxpr, token, *args)
        return _one_by_one(self, plain, jaxpr, token, args)

    monkeypatch.setattr(jaxpr_interpret.JaxprInterpreter, "interpret", interpret)
    recorded = gpu_callbacks.fail_on_exception(_recorded(gpu_callbacks.wgmma))
    monkeypatch.setattr(gpu_callbacks, "wgmma", recorded)
    monkeypatch.setattr(mosaic_products.Wgmma, "simulated", lambda self: self)


def _one_by_one(interpreter, plain, jaxpr, token, args):
    """Interpret a jaxpr, equation by equation: those that the simulator knows as it would."""
    from jax._src import core

    values = dict(zip(jaxpr.constvars + jaxpr.invars, args, strict=True))

    def read(atom):
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        if rule := RULES.get(eqn.primitive.name):
            token, out = rule(interpreter, eqn, token, [read(atom) for atom in eqn.invars])
        else:
            given = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, core.Literal)))
            single = dict(constvars=[], invars=given, outvars=eqn.outvars, eqns=[eqn])
            names = jaxpr.debug_info.with_unknown_names()
            alone = jaxpr.replace(**single, effects=eqn.effects, debug_info=names)
            token, out = plain(interpreter, alone, token, *map(read, given))
        values |= zip(eqn.outvars, out, strict=True)
    return token, [read(atom) for atom in jaxpr.outvars]


def _run_state(interpreter, eqn, token, given):
    from jax._src.state import discharge, types

    kept = [isinstance(v.aval, types.AbstractRef) for v in eqn.outvars]  # references from outside
    pure = discharge.discharge_state(
        eqn.params["jaxpr"], should_discharge=[not k for k in kept], strip_memory_space=True
    )
    token, out = interpreter.interpret(pure, token, *given)
    found = iter(out)
    return token, [old if k else next(found) for old, k in zip(given, kept, strict=True)]


def _wgmma(interpreter, eqn, token, given):
    from jax._src import callback
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax._src.state import types

    total, factors, values, *leaves = given
    assert not isinstance(eqn.invars[1].aval, types.AbstractRef), "a product of shared memory"
    treedefs = [eqn.params[f"{name}_transforms_tree"] for name in "ab"]
    assert eqn.params["acc_transforms_tree"] is None and treedefs[0] is None
    transforms = treedefs[1].unflatten(leaves)
    seen = jax.ShapeDtypeStruct((factors.shape[1], total.shape[1]), factors.dtype)
    token, seen = callback.io_callback(
        gpu_callbacks.fail_on_exception(partial(_read, source_info=eqn.source_info)),
        (gpu_callbacks.TOKEN_SHAPE_DTYPE, seen),
        token=token,
        mesh_location=interpreter.mesh_location,
        thread=interpreter.thread,
        key=values,
        transforms=transforms,
    )
    return token, [total + jnp.matmul(factors, seen, preferred_element_type=total.dtype)]


def _read(*, token, mesh_location, thread, key, transforms, source_info):
    """(token, what a product reads of shared memory)."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory

    memory = gpu_callbacks._get_shared_memory()
    key = gpu_callbacks.HostAllocationKey.from_array(key)
    transforms = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
    access = memory.access(key, transforms)
    place = shared_memory.GPULoggingInfo(mesh_location, thread, source_info)
    found, _, _ = memory.get_buffer_content(key, access, thread, logging_info=place)
    if memory.detect_races:
        with memory.lock:  # products read as asynchronous copies do, not as loads
            memory.clocks[thread].inc(memory.thread_to_vc_position(thread))
            clock = memory.clocks[thread].copy().async_smem_clock
        gpu_callbacks.get_races().check_read(thread, clock, key, access, source_info=source_info)
    return token, found


def _recorded(multiply):
    """The simulator's product of shared memory, whose reads are searched for races as well."""

    def recorded(*, token, mesh_location, thread, source_info, **given):
        for name in "ab":
            key, transforms = (
                given[f"{name}_{end}"] for end in ("allocation_key_as_array", "transforms")
            )
            place = dict(mesh_location=mesh_location, thread=thread, source_info=source_info)
            _read(token=token, key=key, transforms=transforms, **place)
        return multiply(token=token, **place, **given)

    return recorded


RULES = {"run_state": _run_state, "wgmma": _wgmma}
