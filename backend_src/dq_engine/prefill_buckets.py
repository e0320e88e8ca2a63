"""Which prompts, tokens and patches have CUDA graphs of prefill. Without torch, as the settings are read without it."""

Bucket = tuple[int, int]
"""Prompts, tokens."""

# Finer than those of the setting's usual value: eight short prompts should not pay for 2,176 tokens.
_OWN_TOKENS = (16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 3072, 4096, 6144)
_SHORTEST_PROMPT = 8


def parse_buckets(setting: str) -> list[Bucket]:
    """The buckets of `requests:tokens,requests:tokens`; none of an empty text.

    Raises:
        ValueError: it is no such list.
    """
    buckets = []
    for part in setting.split(",") if setting else []:
        prompts, _, tokens = part.strip().partition(":")
        if not (prompts.isdecimal() and tokens.isdecimal() and 0 < int(prompts) <= int(tokens)):
            raise ValueError(f'"{part}" is not requests:tokens, as in 1:320, with no more requests than tokens')
        buckets.append((int(prompts), int(tokens)))
    return buckets


def own_buckets(most_tokens: int, most_prompts: int) -> list[Bucket]:
    """The buckets of an engine whose setting names none: up to the most that a step takes."""
    sizes = [*(tokens for tokens in _OWN_TOKENS if tokens < most_tokens), most_tokens]
    return [(min(max(1, tokens // _SHORTEST_PROMPT), most_prompts), tokens) for tokens in sizes]


def patch_buckets(limit: int) -> list[int]:
    """Numbers of patches to capture LocEnc for: the next is at most half as large again."""
    buckets = [8]
    while buckets[-1] < limit:
        buckets.append(min(limit, max(buckets[-1] + 8, buckets[-1] * 3 // 2 // 8 * 8)))
    return buckets
