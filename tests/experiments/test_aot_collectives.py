"""What devices exchange, read from compiled programs: whole arrays, as often as loops run."""

import os
import subprocess
import sys

import pytest

from experiments.aot import kernels
from experiments.aot.hlo import Module

MODULE = """HloModule made_up

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %p = (s32[], f32[8,4]) parameter(0)
  %n = s32[] get-tuple-element(%p), index=0
  %x = f32[8,4] get-tuple-element(%p), index=1
  %r = f32[8,4] all-reduce(%x), GROUPS, to_apply=%add, metadata={op_name="jit(f)/layer/dot"}
  ROOT %t = (s32[], f32[8,4]) tuple(%n, %r)
}

%condition (p: (s32[], f32[8,4])) -> pred[] {
  %p.1 = (s32[], f32[8,4]) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (a: f32[8,4], w: bf16[16]) -> f32[8,4] {
  %a = f32[8,4] parameter(0)
  %w = bf16[16] parameter(1)
  %g = (bf16[16], bf16[64]) all-gather-start(%w), GROUPS, dimensions={0}
  %gd = bf16[64] all-gather-done(%g)
  %s = f32[2,4] reduce-scatter(%a), GROUPS, dimensions={0}, to_apply=%add
  %c = f32[8,4] collective-permute(%a), source_target_pairs={{0,1},{1,0}}
  %zero = s32[] constant(0)
  %start = (s32[], f32[8,4]) tuple(%zero, %a)
  %w1 = (s32[], f32[8,4]) while(%start), condition=%condition, body=%body, KNOWN
  ROOT %out = f32[8,4] get-tuple-element(%w1), index=1
}
"""
GROUPS = (  # as XLA writes groups of four
    "replica_groups={{0,1,2,3},{4,5,6,7}}",
    "replica_groups=[2,4]<=[8]",
    "replica_groups=mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'b'}",
    "replica_groups=mesh['a'=2,'b'=2,'c'=2] {'b','c'}",
    "replica_groups=mesh['a'=8] {'a':(2)4}",
)


@pytest.mark.parametrize("groups", GROUPS)
def test_exchanges_of_a_text(groups):
    """By hand: a loop of 5 rounds, asynchronous pairs once, whole arrays, groups of four."""
    text = MODULE.replace("GROUPS", groups).replace(
        "KNOWN", 'backend_config={"known_trip_count":{"n":"5"}}'
    )
    rows = kernels.exchanged(Module.parse(text))
    found = {row.pop("kind"): tuple(row.values()) for row in rows}
    assert found == {  # sent around a ring of four: 2 x 3/4, 3/4, 3/4 of the array; all of it
        "all-reduce": ("layer/dot", 4, 5, 5 * 128, 5 * 192),
        "all-gather": ("g", 4, 1, 128, 96),
        "reduce-scatter": ("s", 4, 1, 128, 96),
        "collective-permute": ("c", 2, 1, 128, 128),
    }


SPLIT = """
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from experiments.aot import kernels
from experiments.aot.hlo import Module
mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
def layers(x, w):
    def layer(x, w):
        return jax.lax.psum(jnp.tanh(x @ w), "model"), None
    return jax.lax.scan(layer, x, w)[0]
run = jax.shard_map(
    layers, mesh=mesh, in_specs=(P("data"), P(None, None, "model")), out_specs=P("data"),
    check_vma=False)
shapes = jax.ShapeDtypeStruct((8, 16), "float32"), jax.ShapeDtypeStruct((6, 16, 64), "float32")
text = jax.jit(run).lower(*shapes).compile().as_text()
for c in kernels.exchanged(Module.parse(text)):
    print(c["kind"], c["group"], c["bytes"], c["calls"])
"""


def test_exchanges_of_a_compiled_program():
    """A sum over the mesh in each of six layers: [4, 16] float32 in groups of four."""
    found = subprocess.run(
        [sys.executable, "-c", SPLIT],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"},
        capture_output=True,
        text=True,
    )
    assert found.stdout == "all-reduce 4 1536.0 6.0\n", found.stdout + found.stderr[-500:]
