"""Keys of one JSON object of a ``config.json``, each read once with its type, range and default."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from rooftop.core.errors import RooftopError, unknown
from rooftop.models.config import LARGEST_SIZE

#: The default of a key that has none.
REQUIRED: Any = object()


#: Keys that change no logits: of training (dropout, initial values, auxiliary losses), of generation, of files, and of
#: the classes of transformers.
HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _name_or_path add_cross_attention aliases architectures
    attention_dropout attention_probs_dropout_prob attn_implementation attn_pdrop auto_map aux_loss_alpha
    aux_loss_free_balance_coef bad_words_ids begin_suppress_tokens boi_token_index bos_token_id
    cache_implementation chunk_size chunk_size_feed_forward classifier_dropout cross_attention_hidden_size
    decoder_start_token_id diversity_penalty do_sample dropout dtype early_stopping emb_pdrop embd_pdrop
    embedding_dropout encoder_no_repeat_ngram_size eod_token_id eoi_token_index eos_token_id ep_size
    exponential_decay_length_penalty finetuning_task flash_attn forced_bos_token_id forced_eos_token_id fused_mlp
    gradient_checkpointing hidden_dropout hidden_dropout_prob hidden_dropout_rate id2label im_end_id im_start_id
    image_token_id image_token_index init_std initializer_factor initializer_range input_jitter_noise is_decoder
    is_encoder_decoder is_llama_config label2id layerdrop length_penalty mamba_chunk_size mask_token_id max_length
    min_length model_type moe_jitter_eps moe_loss_weight mtp_num_hidden_layers mtp_transformer_layers
    mtp_use_dedicated_embeddings name_or_path no_repeat_ngram_size num_beam_groups num_beams num_logits_to_keep
    num_mtp_modules num_nextn_predict_layers num_return_sequences org_vocab_size output_attentions
    output_hidden_states output_router_logits output_scores pad_id pad_token_id prefix pretraining_tp problem_type
    pruned_heads quantization_config remove_invalid_values repetition_penalty rescale_prenorm_residual resid_pdrop
    residual_dropout return_dict return_dict_in_generate rope_ratio router_aux_loss router_aux_loss_coef
    router_z_loss_coef sep_token_id seq_aux slow_but_exact source summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj suppress_tokens task_specific_params temperature
    text_end_id text_start_id tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript
    transformers_version typical_p unk_token_id unsloth_fixed unsloth_version use_associative_scan use_bfloat16
    use_cache use_flash_attn use_mamba_kernels use_mambapy use_mem_eff_path use_mtp use_mup video_token_id
    z_loss_coefficient
    """.split()  # noqa: SIM905
)


class Keys:
    """One JSON object of the file ``where``; ``prefix`` is the path to it inside the file ('text_config.').

    A key that is absent takes its default, and so does ``null``, unless the caller says what ``null`` means. Every
    method raises RooftopError on a value of another type or out of range, and on a required key that is absent.
    """

    def __init__(self, data: Any, where: str, prefix: str = "") -> None:
        self.where, self.prefix = where, prefix
        if not isinstance(data, Mapping):
            raise RooftopError(self.field(""), data, "a JSON object")
        self.data = data
        self._read = set[str]()
        self._inner = dict[str, Keys]()

    def field(self, key: str) -> str:
        """Name of ``key`` in errors."""
        return f"{self.where}: {self.prefix}{key}".rstrip(": .")

    def whole(
        self, key: str, default: Any = REQUIRED, *, null: Any = REQUIRED, least: int = 1, most: int = LARGEST_SIZE
    ) -> Any:
        """A whole number from ``least`` to ``most``."""
        accepted = f"a whole number from {least} to {most:,}"
        value = self._get(key, default, null, int, accepted)
        if key in self.data and value is not None and not least <= value <= most:
            raise RooftopError(self.field(key), value, accepted)
        return value

    def number(self, key: str, default: Any = REQUIRED, *, null: Any = REQUIRED) -> Any:
        """A finite number that is not negative."""
        value = self._get(key, default, null, (int, float), "a number")
        if value is not None and not 0 <= value < math.inf:
            raise RooftopError(self.field(key), value, "a number that is not negative")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        return bool(self._get(key, default, REQUIRED, bool, "true or false"))

    def text(self, key: str, default: Any = REQUIRED) -> Any:
        """A text."""
        return self._get(key, default, REQUIRED, str, "a text")

    def name(self, key: str, known: Mapping[str, Any], default: Any = REQUIRED) -> Any:
        """Return the value of ``known`` for the text under ``key``."""
        text = self.text(key, default)
        if text not in known:
            raise unknown(self.field(key), text, known)
        return known[text]

    def array(self, key: str, default: Any = REQUIRED) -> Any:
        """A list."""
        return self._get(key, default, REQUIRED, list, "a list")

    def inner(self, key: str) -> Keys:
        """The JSON object under ``key``."""
        data = self._get(key, REQUIRED, REQUIRED, Mapping, "a JSON object")
        return self._inner.setdefault(key, Keys(data, self.where, f"{self.prefix}{key}."))

    def has(self, key: str) -> bool:
        """Return True if ``key`` is present and neither null nor empty."""
        self._read.add(key)
        return bool(self.data.get(key))

    def first(self, *names: str) -> str:
        """The first of several spellings of a key that the file has; without any the first of all."""
        self._read.update(names)
        return next((name for name in names if self.data.get(name) is not None), names[0])

    def ignore(self, *names: str) -> None:
        """Accept keys that change nothing in this family."""
        self._read.update(names)

    @property
    def used(self) -> frozenset[str]:
        """Keys that have been read, whether or not the file has them."""
        return frozenset(self._read)

    def check(self) -> None:
        """Refuse keys that nothing has read, unless they are known to change nothing or are switched off."""
        for key, value in self.data.items():
            if key not in self._read and key not in HARMLESS and value not in (None, False, 0, "", [], {}):
                accepted = "no such key: its meaning is unknown here, and may change the computation"
                raise RooftopError(self.field(key), value if len(repr(value)) <= 80 else "...", accepted)
        for inner in self._inner.values():
            inner.check()

    def only(self, key: str, *accepted: Any) -> None:
        """Refuse a value other than ``accepted`` or null: it asks for something that nothing here can express."""
        self._read.add(key)
        value = self.data.get(key)
        if value is not None and value not in accepted:
            raise RooftopError(self.field(key), value, " or ".join(json.dumps(choice) for choice in accepted))

    def _get(self, key: str, default: Any, null: Any, kind: Any, accepted: str) -> Any:
        self._read.add(key)
        value = self.data.get(key)
        if value is None:
            meant = null if key in self.data and null is not REQUIRED else default
            if meant is REQUIRED:
                raise RooftopError(self.field(key), None, f"{accepted}; the key is required")
            return meant
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise RooftopError(self.field(key), value, accepted)
        return value
