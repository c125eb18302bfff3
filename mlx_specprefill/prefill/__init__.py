"""SpecPrefill proper: plan, score, select, prefill."""
