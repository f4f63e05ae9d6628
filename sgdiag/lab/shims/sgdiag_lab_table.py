"""Answers of the lab's models without their arithmetic, so that a scheduler steps every few milliseconds, as on a GPU.

The output for a token depends on that token alone (see make_models.py), so a table gives the logits; nobody looks into
the hidden states. Prompts are computed, since the pools and the radix cache fill by them. Where the tables would not
fit, the model answers itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

WRONG_DRAFTS = 5
"""One draft of so many is wrong."""


def install(runner: ModuleType) -> None:
    """Put the table in front of ``EagerRunner.execute`` of SGLang's runner module."""
    import torch
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    compute = runner.EagerRunner.execute
    rows: dict[bool, Any] = {}
    forms: dict[tuple[bool, int, int], tuple[Any, Any]] = {}

    def read_tables(model_path: str) -> None:
        follows = torch.tensor(json.loads((Path(model_path).parent / "expected_next.json").read_text()))
        drafted = follows.clone()
        wrong = torch.arange(0, len(follows), WRONG_DRAFTS)
        drafted[wrong] = follows[(wrong + 1) % len(follows)]
        eye = torch.eye(len(follows))
        rows.update({False: eye[follows], True: eye[drafted]})

    def execute(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        mode, is_draft = batch.forward_mode, self.model_runner.is_draft_worker
        tokens = len(batch.input_ids)
        # A prompt's logits are of its last token alone, those of the other modes of every token.
        form = forms.get((is_draft, int(mode), tokens))
        if mode.is_extend_without_speculative() or form is None:
            output = compute(self, batch, *args, **kwargs)
            logits = getattr(output, "next_token_logits", None)
            if logits is not None and len(logits) == tokens:
                forms[is_draft, int(mode), tokens] = logits, output.hidden_states
            return output
        if not rows:
            read_tables(self.model_runner.model_config.model_path)
        logits, hidden = form
        return LogitsProcessorOutput(
            next_token_logits=rows[is_draft][batch.input_ids].to(logits.dtype),
            hidden_states=None if hidden is None else torch.zeros_like(hidden),
        )

    runner.EagerRunner.execute = execute
