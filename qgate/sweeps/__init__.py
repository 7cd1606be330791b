"""One quantizer over many scales: a curve, advice, texts, pictures and a page."""
