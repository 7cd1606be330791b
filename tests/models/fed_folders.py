"""Folders of small networks with random weights that are fed images, sound, or several inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.models.checkpoints import byte_level_tokenizer, randomize

VOCABULARY = 320
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
SOUND = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "conv_dim": (16, 16),
    "conv_kernel": (400, 4),
    "conv_stride": (160, 4),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}
WHISPER = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_mel_bins": 16,
    "max_source_positions": 20,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
CLIP = {
    "projection_dim": 16,
    "text_config": TEXT | {"max_position_embeddings": 24},
    "vision_config": VISION,
}
DETR = {
    "backbone": None,
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone_config": {
        "model_type": "resnet",
        "hidden_sizes": [16, 32],
        "depths": [1, 1],
        "embedding_size": 16,
        "layer_type": "basic",
        "out_features": ["stage2"],
    },
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_queries": 6,
    "num_labels": 3,
}
CLAP_SOUND = {
    "hidden_size": 32,
    "patch_embeds_hidden_size": 16,
    "depths": [1, 1],
    "num_attention_heads": [2, 4],
    "num_mel_bins": 16,
    "spec_size": 64,
    "projection_dim": 16,
    "window_size": 4,
}

# The config and its class by the class of the network.
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "BertModel": ("BertConfig", TEXT),
    "BertForSequenceClassification": ("BertConfig", TEXT),
    "RobertaForMaskedLM": ("RobertaConfig", TEXT | {"max_position_embeddings": 26, "pad_token_id": 1}),
    "T5EncoderModel": ("T5Config", {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}),
    "T5ForConditionalGeneration": ("T5Config", {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}),
    "ViTForImageClassification": ("ViTConfig", VISION | {"num_channels": 1}),
    "ConvNextForImageClassification": ("ConvNextConfig", {"hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2, "image_size": 16}),
    "ResNetModel": ("ResNetConfig", {"hidden_sizes": [16, 32], "depths": [1, 1], "embedding_size": 16}),
    "VideoMAEModel": ("VideoMAEConfig", VISION | {"num_frames": 4, "tubelet_size": 2}),
    "CLIPModel": ("CLIPConfig", CLIP),
    "ClapModel": ("ClapConfig", {"text_config": TEXT, "audio_config": CLAP_SOUND, "projection_dim": 16}),
    "ClapAudioModelWithProjection": ("ClapAudioConfig", CLAP_SOUND | {"enable_fusion": True}),
    "DetrForObjectDetection": ("DetrConfig", DETR),
    "ViltModel": ("ViltConfig", TEXT | VISION | {"max_position_embeddings": 24}),
    "SwinModel": ("SwinConfig", {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2], "window_size": 2}),
    "Wav2Vec2ForCTC": ("Wav2Vec2Config", SOUND | {"vocab_size": 32}),
    "HubertModel": ("HubertConfig", SOUND),
    "ASTModel": ("ASTConfig", {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "max_length": 32, "num_mel_bins": 16, "patch_size": 8, "frequency_stride": 8, "time_stride": 8}),
    "WhisperForAudioClassification": ("WhisperConfig", WHISPER | {"classifier_proj_size": 16}),
    "WhisperForConditionalGeneration": ("WhisperConfig", WHISPER),
    "PatchTSTModel": ("PatchTSTConfig", {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4, "num_hidden_layers": 1, "d_model": 8, "num_attention_heads": 2, "ffn_dim": 8}),
}  # fmt: skip


def network_of(kind: str) -> Any:
    """Build a network of random weights, seeded."""
    import transformers

    config, fields = NETWORKS[kind]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = getattr(transformers, kind)(getattr(transformers, config)(**fields))
    randomize(network)
    return network.eval()


def save_network(
    kind: str, folder: Path, part: Callable[[Any], Any] = lambda network: network
) -> Path:
    """Save a network, or a part of it, and a tokenizer beside it."""
    import transformers

    part(network_of(kind)).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level_tokenizer(VOCABULARY - 8), bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder
