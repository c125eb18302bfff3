"""Helpers of the tests.

- Models: `tiny` (random, of every family), `scripted` (say what a test wants), `real_model` (SmolLM2), `gguf_files`,
  `tokenizers_of_all_kinds`.
- Right answers: `oracle` (masked dense runs), `autoregressive`, `dense`, `verdict_oracle`, `precision`
  (tolerances by dtype), `refusals` (the table of architectures).
- Surroundings: `serving` (a server), `browser`, `hub`, `device`, `waiting`, `steps`, `rows`.
"""
