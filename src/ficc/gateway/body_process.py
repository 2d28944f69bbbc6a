"""The process in which large inference bodies are read: `python -m ficc.gateway.body_process`.

    question = body's length u32 | depth_max u32 | values_max u32 | body       (big endian)
    answer   = length u32 | JSON: a request, or a refusal

A refusal is an answer. Whatever else goes wrong ends the process, and its starter sees that.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from ficc.domain.errors import Refused
from ficc.protocol import openai
from ficc.protocol.strict_json import Place

QUESTION = struct.Struct(">III")
ANSWER = struct.Struct(">I")
OOM_SCORE = "500"
"""Where memory is short, this process is to go and not the one that serves."""


def serve(questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer until the questions end."""
    while len(head := questions.read(QUESTION.size)) == QUESTION.size:
        length, depth_max, values_max = QUESTION.unpack(head)
        body = questions.read(length)
        if len(body) < length:
            return
        answer = json.dumps(_answer(body, depth_max, values_max)).encode()
        del body  # not while the next one is waited for
        answers.write(ANSWER.pack(len(answer)) + answer)
        answers.flush()


def _answer(body: bytes, depth_max: int, values_max: int) -> dict[str, Any]:
    try:
        return {"request": dataclasses.asdict(openai.read(body, depth_max=depth_max, values_max=values_max))}
    except Refused as refused:
        return {"refused": [refused.code, refused.message, refused.param]}


def request_of(answer: dict[str, Any]) -> openai.Request:
    """What an answer says. Raises the refusal that it carries."""
    if "refused" in answer:
        raise Refused(*answer["refused"])
    request = answer["request"]
    return openai.Request(request["model"], request["stream"], Place(*request["place"]))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the one that serves
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)
    with suppress(BrokenPipeError):
        serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
