"""One quantizer over many scales: levels, sums, advice."""
