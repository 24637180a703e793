"""What is kept, evicted, loaded, batched and waited for: decisions only. No torch, vllm, xoscar, clock or I/O."""
