"""An OpenAI-compatible service on a real socket whose model is a function."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from memjax.rollout.fake import Reply
from memjax.trajectory import SamplingParams


@dataclass
class Service:
    url: str = ""
    prompts: list[str] = field(default_factory=list)
    status: Callable[[int], int] = lambda call: 200  # from the number of the call


@contextmanager
def serving(reply: Reply, *, seconds: float = 0.0, window: int = 100_000) -> Iterator[Service]:
    """Answer every chat with `reply`, after a while."""
    service = Service()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send({"data": [{"id": "stub", "max_model_len": window}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompt = "\n".join(message["content"] for message in body["messages"])
            service.prompts.append(prompt)
            status = service.status(len(service.prompts) - 1)
            time.sleep(seconds)
            text = reply(prompt, SamplingParams(seed=body.get("seed")))
            choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            usage = {"prompt_tokens": len(prompt), "completion_tokens": len(text)}
            self._send({"choices": [choice], "usage": usage}, status)

        def _send(self, body: dict[str, Any], status: int = 200) -> None:
            data = json.dumps(body).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True  # the client was killed, as a test wants it

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    service.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
