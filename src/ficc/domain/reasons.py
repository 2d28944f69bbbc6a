"""The codes of reasons that are no errors of a request: why a replica ended, why a placement does not do.

A `Reason` has one of these codes, or, where a refusal became one, a code of `ficc.protocol.http_api.CODES`.
"""

from __future__ import annotations

from collections.abc import Mapping

REASONS: Mapping[str, str] = {
    # why a placement does not do, or is only just enough
    "node_unknown": "The project has no such node.",
    "node_disconnected": "The node's executor is not connected to the controller.",
    "endpoint_unsupported": "The node's executor is too old for inference.",
    "memory_limit_too_small": "The model needs more memory than the placement allows.",
    "context_beyond_training": "The context is longer than the model was made for: a warning.",
    "tight": "It fits with little to spare: a warning.",
    # why an attempt ended
    "exited": "The command exited with status 0.",
    "engine_exited": "The engine exited by itself.",
    "engine_killed": "A signal ended the engine.",
    "out_of_memory": "The kernel killed the engine at its memory limit.",
    "launch_failed": "The sandbox or the engine in it could not be started.",
    "prepare_timeout": "The engine's process did not run within `lifecycle.prepare_seconds`.",
    "ready_timeout": "The engine did not answer within `lifecycle.ready_seconds`.",
    "engine_unresponsive": "An engine that was ready gave no sign of life for `lifecycle.liveness_seconds`.",
    "readiness_failed": "The engine answers its test request with an error.",
    "lease_lapsed": "The lease was not renewed in time, so the sandbox was ended.",
    "executor_shutdown": "The executor was shut down and ended what it ran.",
    "executor_restarted": "The executor restarted and ended what an earlier run of it had left.",
    "start_not_confirmed": "The start was lost on its way, and had not happened.",
    "job_cancelled": "Somebody cancelled the job.",
    # why an attempt that ended is not released
    "quarantined": "What is left of the attempt cannot be removed, so its reservation stays held.",
    # why an attempt's outcome is unknown
    "end_not_observed": "The executor was gone, and nobody saw how the engine ended.",
    "node_rebooted": "The machine was rebooted while the attempt held its lease.",
    "lease_over": "The node has not answered since before its lease ended.",
    # what becomes of a replica
    "engine_loading": "The engine loads its model; the message is the last thing that it said.",
    "restart_pending": "The replica is tried again; the message says when, and how often it was.",
    # services and files
    "no_replicas": "The service has no replica.",
    "partial_shortened": "An unfinished file had lost bytes on the disk.",
    "content_lost": "A verified file was gone from the content store, or had been damaged there.",
}
