"""The fake server with a cache that its replicas share: enough of one for the demonstration to be carried out on it."""

from dataclasses import dataclass, field
from typing import Any

from xinference.client.test.fakes import Answer, FakeServer, chunk, xavier_status

BLOCK = 32


@dataclass
class SharingServer(FakeServer):
    """Prompts of token ids are remembered by the replica that computed them; others take their full blocks from it.

    Args:
        lies_by: by how much vLLM's own counter differs from the accounting.
        shares: whether a prompt is found at all.
    """

    lies_by: int = 0
    shares: bool = True
    owner_by_prompt: dict[tuple[int, ...], str] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)
    saves: dict[str, int] = field(default_factory=dict)

    def _route(self, method: str, parts: list[str], params: dict[str, str], body: dict[str, Any], headers: dict[str, str]) -> Answer:
        match (method, *parts):
            case ("POST", "tokenize"):
                words = body["prompt"].split()
                return Answer(body={"tokens": [sum(word.encode()) for word in words], "count": len(words)})
            case ("GET", "metrics"):
                return Answer(body="".join(self._metric(uid, count) for uid, count in self.hits.items()))
            case ("GET", "v1", "models", uid, "xavier") if uid in self.models:
                status = xavier_status(self.models[uid]["replicas"], enabled=True)
                for found in status["replicas"]:
                    found["counters"] = {"saves_blocks": self.saves.get(found["replica_uid"], 0)}
                return Answer(body=status)
            case ("POST", "v1", "completions") if isinstance(body["prompt"], list):
                return self._share(body, headers["x-xinference-replica"])
        return super()._route(method, parts, params, body, headers)

    def _metric(self, replica_uid: str, count: int) -> str:
        model = replica_uid.rpartition("-")[0]
        return f'vllm:external_prefix_cache_hits_total{{model="{model}",replica="{replica_uid}"}} {float(count)}\n'

    def _share(self, body: dict[str, Any], replica_uid: str) -> Answer:
        prompt = tuple(body["prompt"])
        owner = self.owner_by_prompt.setdefault(prompt, replica_uid)
        blocks = (len(prompt) - 1) // BLOCK
        found = blocks * BLOCK if self.shares and owner != replica_uid else 0
        self.hits[replica_uid] = self.hits.get(replica_uid, 0) + found + (self.lies_by if found else 0)
        self.saves[replica_uid] = self.saves.get(replica_uid, 0) + (blocks if not found else 0)
        last = {"choices": [], "usage": {"prompt_tokens": len(prompt), "completion_tokens": 1}}
        sources = {"local": 0, "peer_cpu": found, "computed": len(prompt) - found}
        last |= {"xinference": {"replica": replica_uid, "sources": sources, "recomputed_tokens": 0, "ttft_ms": 1.0}}
        return Answer(body=[chunk(body, "word"), self._json(last), "[DONE]"], stream=True)

    def _json(self, value: dict[str, Any]) -> str:
        return Answer(body=value).payload().decode()
