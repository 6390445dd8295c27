"""Tables to plan and compile, and a scheduled program with SparseCore work: what several test modules read."""

from __future__ import annotations

TOML = """
[tables.user]
vocabulary = 5_000_000
width = 64
optimizer = {kind = "adagrad", learning_rate = 0.05}
[tables.tag]
vocabulary = 1000
width = 12
[features.user_id]
table = "user"
ids_per_sample = 20
[features.tags]
table = "tag"
ids_per_sample = 5
"""
HLO = """HloModule jit_step, is_scheduled=true

%sparse (a: f32[8]) -> f32[8] {
  ROOT %a = f32[8]{0} parameter(0)
}, execution_thread="sparsecore"

%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%p)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %before = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused
  %start = ((f32[8]), f32[8]) call-start(%x), async_execution_thread="sparsecore", to_apply=%sparse
  %beside = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused
  %done = f32[8]{0} call-done(%start)
  ROOT %after = f32[8]{0} fusion(%done), kind=kLoop, calls=%fused
}
"""
