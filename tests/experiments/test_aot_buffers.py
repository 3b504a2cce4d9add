"""Reading what compilers write about buffers, on short texts in their format."""

import pytest

from experiments.aot import buffers
from experiments.aot.hlo import Module

POOL = buffers.Carried("kv_pool", (4, 10, 8, 128))
SCALE = buffers.Carried("kv_scale", (4, 10, 16), "float32")
POSITION = buffers.Carried("position", (4, 80), "int32", flat=True)

ASSIGNMENT = """\
BufferAssignment:
allocation 0: size 80, parameter 0, shape |bf16[4,10,8,128]| at ShapeIndex {}, maybe-live-out:
 value: <1 state_kv_pool.1 @0> (size=80,offset=0): bf16[4,10,8,128]{3,2,1,0}
 value: <2 scatter.3 @0> (size=80,offset=0): bf16[4,80,128]{2,1,0}
allocation 1: size 900, preallocated-temp:
 value: <3 scores.1 @0> (size=600,offset=0): f32[64,256]{1,0}
 value: <4 weights.1 @0> (size=300,offset=0): bf16[64,256]{1,0}
 value: <5 pair.1{} @0> (size=16,offset=880): (f32[2]{0}, f32[2]{0})
 value: <6 pair.1{1} @0> (size=200,offset=600): f32[2]{0}
 value: <7 loop.1{0} (phi) @0> (size=100,offset=800): f32[10,10]{1,0}
 value: <8 late.1 @0> (size=700,offset=0): f32[70,10]{1,0}
allocation 2: size 5000, color 1, preallocated-temp:
 value: <9 fetched.1 @1> (size=5000,offset=0): f32[1250]{0:S(1)}
"""
TEXT = """\
ENTRY %main () -> f32[10,10] {
  %scores.1 = f32[64,256]{1,0} fusion(%q), metadata={op_name="jit(f)/while/body/attend/dot_general"}
  %copy.7 = f32[2]{0:T(128)} copy(%bitcast.9)
  %bitcast.9 = f32[2]{0} bitcast(%scores.1)
  %pair.1 = (f32[2]{0}, f32[2]{0}, u32[]{:S(2)}) copy-start(%copy.7), backend_config={}
  %late.1 = f32[70,10]{1,0} iota(), iota_dimension=0
  ROOT %loop.1 = (f32[10,10]{1,0}) while(%t), metadata={op_name="jit(f)/while"}
}
"""


PROGRAM = Module.parse(TEXT)


def program(instructions: str = "") -> Module:
    return Module.parse(f"ENTRY %main () -> f32[2] {{\n{instructions}\n}}")


def test_the_largest_of_each_place():
    found = buffers.temporaries(ASSIGNMENT, PROGRAM)
    sizes = [(b.name, b.size) for b in buffers.largest(found, 3)]
    assert sizes == [("late.1", 700), ("pair.1", 200), ("loop.1", 100)]
    # neither arguments nor another memory
    assert not {"state_kv_pool.1", "scatter.3", "fetched.1"} & {b.name for b in found}


def test_sources():
    found = buffers.temporaries(ASSIGNMENT, PROGRAM)
    sources = {b.name: b.source for b in found}
    assert sources["scores.1"] == "attend/dot_general"
    assert sources["pair.1"] == "copy-start of copy of attend/dot_general"
    assert sources["late.1"] == "iota" and sources["weights.1"] == ""
    assert sources["loop.1"] == "carried through a loop"
    assert buffers.short_source("jit(f)/eval_jaxpr/cond/branch_0_fun/head/mul") == "head/mul"
    assert buffers.short_source("model.head.kernel") == "model.head.kernel"


def test_copies_of_the_pool():
    moves = """\
  %a = bf16[4,10,8,128]{3,2,1,0} copy(%b)
  %c = (f32[4,80,128]{2,1,0}, f32[4,80,128]{1,2,0}, u32[]) copy-start(%a)
  ROOT %d = s8[40,8,128]{2,1,0:T(8,128)(4,1)} transpose(%c), dimensions={0,2,1}
  %e = f32[320,128]{1,0} convert(%d)
"""
    others = """\
  %f = bf16[4,10,8,128]{3,2,1,0} fusion(%copy), kind=kLoop, calls=%copy_fusion
  %g = bf16[4,10,8,64]{3,2,1,0} copy(%b)
  %h = (bf16[4,10,8,128]{3,2,1,0}, bf16[4,10,8,128]{3,2,1,0:S(1)}, u32[]) copy-start(%b)
  %i = bf16[4,10,8,128]{3,2,1,0} dynamic-update-slice(%b, %copy.1, %c)
"""
    assert len(buffers.second_copies(program(moves + others), [], [POOL])["kv_pool"]) == 4
    assert buffers.second_copies(program(others), [], [POOL]) == {}


def test_copies_of_smaller_arrays():
    """Counted in their own type only: a mask or an index may have the shape of `position`."""
    text = """\
  %a = f32[4,10,16]{2,1,0} copy(%b)
  %c = f32[40,16]{1,0} transpose(%a), dimensions={0,1}
  %d = s8[4,10,16]{2,1,0} copy(%b)
  %e = f32[4,10,8]{2,1,0} copy(%b)
  %f = s32[4,80]{1,0} copy(%g)
  %h = pred[4,80]{1,0} copy(%i)
"""
    found = buffers.second_copies(program(text), [], [POOL, SCALE, POSITION])
    lines = {name: [line.split()[0] for line in copies] for name, copies in found.items()}
    assert lines == {"kv_scale": ["%a", "%c"], "position": ["%f"]}


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ("f32[4,10,16]{2,1,0}", {"kv_scale"}),
        ("f32[40,16]{1,0}", {"kv_scale"}),
        ("s32[4,10,16]{2,1,0}", set()),
        ("s32[4,80]{1,0}", set()),  # usual: one number for every slot
        ("f32[4,80,128]{2,1,0}", {"kv_pool"}),
        ("bf16[40,8,128]{2,0,1:T(8,128)}", {"kv_pool"}),
        ("s8[4,10,8,128]", {"kv_pool"}),
    ],
)
def test_second_buffers(shape, names):
    text = ASSIGNMENT.replace("f32[70,10]{1,0}", shape)
    found = buffers.temporaries(text, PROGRAM)
    copies = buffers.second_copies(program(), found, [POOL, SCALE, POSITION])
    assert set(copies) == names
    assert all(line.startswith("late.1: ") for (line,) in copies.values())


def test_unreadable(tmp_path):
    assert buffers.read_dump(tmp_path, PROGRAM) == []
    (tmp_path / "m.buffer-assignment.txt").write_text("another format")
    assert buffers.read_dump(tmp_path, PROGRAM) == []
    (tmp_path / "m.buffer-assignment.txt").write_text(ASSIGNMENT)
    assert len(buffers.read_dump(tmp_path, PROGRAM)) == 5
