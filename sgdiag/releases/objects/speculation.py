"""Draft workers, old and new, with what they draft and how they adapt."""

from __future__ import annotations

from sgdiag.releases.objects.form import Alternative, Row, absent, along, at, row

_WORKER = "Scheduler.draft_worker"
_FIRST = "EAGLEWorker|MultiLayerEagleWorker|FrozenKVMTPWorker"
"""Workers that are the draft's TpModelWorker themselves (spec v1)."""
_SECOND = "EAGLEWorkerV2|MultiLayerEagleWorkerV2"
"""Workers that hold a draft worker (spec v2)."""

DRAFT_RUNNERS: tuple[Alternative, ...] = (
    at(f"{_WORKER} {_FIRST}._model_runner", until="0.5.14"),
    at(f"{_WORKER} EAGLEWorkerV2._draft_worker EagleDraftWorker.draft_runner"),
    at(f"{_WORKER} MultiLayerEagleWorkerV2._draft_worker MultiLayerEagleDraftWorker.draft_runner_list[0]"),
    at(f"{_WORKER} EAGLEWorkerV2._draft_worker FrozenKVMTPDraftWorker._model_runner", "0.5.14"),
    at(f"{_WORKER} DFlashWorker|DFlashWorkerV2.draft_model_runner", "0.5.11"),
)
"""The draft model's ModelRunner (the first of them where each step has its own)."""

_NOT_YET = absent(
    "adaptive speculation came with 0.5.11",
    until="0.5.11",
    missing=("AdaptiveController.params", "EAGLEWorker.adaptive_controller"),
)
_CONTROLLERS: tuple[Alternative, ...] = (
    at(f"{_WORKER} EAGLEWorker.adaptive_controller", "0.5.11", "0.5.13"),
    at(f"{_WORKER} EAGLEWorkerV2.adaptive_controller", "0.5.12"),
)

ROWS: tuple[Row, ...] = (
    row(
        "speculation.algorithm",
        "static",
        "enum",
        "EAGLE, EAGLE3, STANDALONE, NGRAM, …, or NONE; a plugin's algorithm is no enum member",
        at("Scheduler.spec_algorithm"),
        field="speculation.algorithm",
    ),
    row(
        "speculation.worker",
        "static",
        "class",
        "class of the draft worker, None for a server that does not speculate",
        at(_WORKER),
        field="speculation.worker",
    ),
    row(
        "speculation.steps",
        "slow",
        "value",
        "steps that are drafted now; an adaptive server changes it",
        at(f"{_WORKER} {_FIRST}.speculative_num_steps", until="0.5.14"),
        at(f"{_WORKER} {_SECOND}.speculative_num_steps"),
        at(f"{_WORKER} NGRAMWorker.speculative_num_steps", "0.5.14"),
        field="speculation.steps",
        unit="steps",
    ),
    row(
        "speculation.topk",
        "static",
        "value",
        "branches per drafted step",
        at(f"{_WORKER} {_FIRST}.topk", until="0.5.14"),
        at(f"{_WORKER} {_SECOND}.topk"),
        at(f"{_WORKER} NGRAMWorker.topk", "0.5.14"),
        field="speculation.topk",
    ),
    row(
        "speculation.draft_tokens",
        "slow",
        "value",
        "tokens that the target verifies per request now; an adaptive server changes it",
        at(f"{_WORKER} {_FIRST}.speculative_num_draft_tokens", until="0.5.14"),
        at(f"{_WORKER} {_SECOND}.speculative_num_draft_tokens"),
        at(f"{_WORKER} NGRAMWorker.draft_token_num", until="0.5.14"),
        at(f"{_WORKER} NGRAMWorker|DFlashWorkerV2.speculative_num_draft_tokens", "0.5.14"),
        field="speculation.draft_tokens",
        unit="tokens",
    ),
    row(
        "speculation.verify_calls",
        "slow",
        "value",
        "verifications since the start, counted per request",
        at("Scheduler.spec_total_num_forward_ct", until="0.5.13"),
        at("Scheduler.metrics_reporter SchedulerMetricsReporter.spec_total_num_forward_ct", "0.5.13"),
        field="speculation.verify_calls_total",
    ),
    row(
        "speculation.accepted_tokens",
        "slow",
        "value",
        "tokens that came out of these verifications; divided by their number, the accept length",
        at("Scheduler.spec_total_num_accepted_tokens", until="0.5.12"),
        at("Scheduler.spec_total_num_accept_tokens", "0.5.12", "0.5.13"),
        at("Scheduler.metrics_reporter SchedulerMetricsReporter.spec_total_num_accept_tokens", "0.5.13"),
        unit="tokens",
    ),
    row(
        "speculation.adaptive",
        "static",
        "class",
        "class of the controller that adapts the steps, None without",
        *_CONTROLLERS,
        _NOT_YET,
    ),
    row(
        "speculation.adaptive.states",
        "static",
        "keys",
        "numbers of steps that graphs were captured for",
        *along(_CONTROLLERS, "AdaptiveController._states"),
        _NOT_YET,
    ),
    row(
        "speculation.adaptive.steps",
        "slow",
        "value",
        "steps that the controller has chosen, one number for all batch sizes",
        *along(_CONTROLLERS, "AdaptiveController.params AdaptiveSpeculativeParams.current_steps", until="0.5.13"),
        absent(
            "since 0.5.13 the steps are chosen per batch size",
            since="0.5.13",
            missing=("AdaptiveSpeculativeParams.current_steps",),
            instead="speculation.steps",
        ),
        _NOT_YET,
        unit="steps",
    ),
    row(
        "speculation.adaptive.accept_length",
        "slow",
        "value",
        "moving average of accepted tokens that the choice rests on",
        *along(_CONTROLLERS, "AdaptiveController.params AdaptiveSpeculativeParams.ema_accept_len", until="0.5.13"),
        absent(
            "since 0.5.13 the average is kept per batch size",
            since="0.5.13",
            missing=("AdaptiveSpeculativeParams.ema_accept_len",),
            instead="speculation.steps",
        ),
        _NOT_YET,
        unit="tokens",
    ),
    row(
        "speculation.adaptive.batch_sizes",
        "static",
        "keys",
        "batch sizes from which a choice of its own is made",
        absent(
            "before 0.5.13 one choice is made for all batch sizes",
            since="0.5.11",
            until="0.5.13",
            missing=("AdaptiveSpeculativeParams._slots",),
            instead="speculation.adaptive.steps",
        ),
        *along(_CONTROLLERS, "AdaptiveController.params AdaptiveSpeculativeParams._slots", since="0.5.13"),
        _NOT_YET,
        unit="requests",
    ),
    row(
        "draft.attention",
        "static",
        "class",
        "class of the draft model's attention backend",
        *along(DRAFT_RUNNERS, "ModelRunner.attn_backend"),
        field="speculation.draft_attention_backend",
    ),
    row(
        "draft.kv.pool",
        "static",
        "class",
        "class of the draft model's KV pool",
        *along(DRAFT_RUNNERS, "ModelRunner.token_to_kv_pool"),
    ),
    row(
        "draft.kv.bytes",
        "static",
        "value",
        "memory of the draft model's KV buffers",
        *along(
            DRAFT_RUNNERS,
            "ModelRunner.token_to_kv_pool MHATokenToKVPool|MLATokenToKVPool|HybridLinearKVPool|SWAKVPool.mem_usage",
        ),
        unit="GiB",
    ),
    row(
        "draft.weights",
        "static",
        "value",
        "memory that loading the draft model took",
        *along(DRAFT_RUNNERS, "ModelRunner.weight_load_mem_usage"),
        field="rank.memory.draft_weights_bytes",
        unit="GiB",
    ),
)
