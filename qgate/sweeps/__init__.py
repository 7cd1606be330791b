"""Sweep a quantizer over many scales: curve, advice, texts, pictures and a page."""
