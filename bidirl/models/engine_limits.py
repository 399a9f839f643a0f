"""What bounds the batch of one engine."""

from dataclasses import dataclass

from bidirl.errors import InputError

__all__ = ["EngineLimits"]


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What bounds the batch of one engine; names and defaults are vLLM's."""

    kv_tokens: int
    """KV memory in tokens as the engine reports it; one block of it is vLLM's null block, never used."""
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        """Refuse limits under which no engine starts."""
        if self.block_size < 1 or self.max_num_seqs < 1:
            raise InputError(
                f"block_size={self.block_size}, max_num_seqs={self.max_num_seqs}: both must be at least 1"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InputError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs="
                f"{self.max_num_seqs}: every running sequence needs one token, raise it"
            )
        if self.kv_tokens < 2 * self.block_size:
            raise InputError(
                f"kv_tokens={self.kv_tokens} is below two blocks of {self.block_size}: "
                "the model leaves no KV memory, use a larger GPU or more tensor parallelism"
            )

    @property
    def num_blocks(self) -> int:
        """Return the usable KV blocks. Source: vLLM ``BlockPool`` keeps block 0 as the null block."""
        return self.kv_tokens // self.block_size - 1
