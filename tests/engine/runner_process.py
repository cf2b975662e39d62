"""A process that holds a runner of the embedded model, and runs the encoded batches that it receives.

Arguments: a file descriptor of a connection, the cache folder, and flags of `prepare_tiny` as JSON. Messages are a
letter and bytes: `b`, an encoded StepBatch, which is run, or applied if it has no tokens; `s`, the masks of the last
batch, whose tokens are sampled and sent back.
"""

from __future__ import annotations

import json
import sys
from multiprocessing.connection import Connection

import numpy
import torch
from msgspec.msgpack import Decoder

from tcdeploy.engine.schedule.step_batch import StepBatch
from tests.conftest import prepare_tiny


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    runner = prepare_tiny(sys.argv[2], **json.loads(sys.argv[3])).engine.runner
    decoder = Decoder(StepBatch)
    connection.send_bytes(b"ready")
    while message := connection.recv_bytes():
        kind, content = message[:1], message[1:]
        if kind == b"b":
            batch = decoder.decode(content)
            if batch.num_tokens:
                output = runner.run(batch)
            else:
                runner.apply(batch)
            continue
        masks = torch.from_numpy(numpy.frombuffer(content, numpy.int32).copy()).view(-1, -(-runner.vocab_size // 32))
        tokens, _ = runner.sample(batch, output, masks if content else None)
        connection.send_bytes(tokens.numpy().tobytes())


if __name__ == "__main__":
    main()
