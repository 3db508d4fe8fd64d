#include "policy/adaptive_policy.h"
#include "policy/simple_policies.h"

namespace vmem::policy {

std::unique_ptr<EvictionPolicy> make_eviction_policy(EvictionPolicyKind kind) {
  switch (kind) {
    case EvictionPolicyKind::adaptive:
      return std::make_unique<AdaptivePolicy>();
    case EvictionPolicyKind::fifo:
      return std::make_unique<FifoPolicy>();
    case EvictionPolicyKind::sieve:
      return std::make_unique<SievePolicy>();
    case EvictionPolicyKind::s3fifo:
      return std::make_unique<S3FifoPolicy>();
    case EvictionPolicyKind::twoq:
      return std::make_unique<TwoQPolicy>();
  }
  return std::make_unique<AdaptivePolicy>();
}

}  // namespace vmem::policy
