#include "policy/adaptive_evictor.h"
#include "policy/simple_evictors.h"

namespace vmem::policy {

std::unique_ptr<Evictor> make_evictor(EvictorKind kind) {
  switch (kind) {
    case EvictorKind::adaptive:
      return std::make_unique<AdaptiveEvictor>();
    case EvictorKind::fifo:
      return std::make_unique<FifoEvictor>();
    case EvictorKind::sieve:
      return std::make_unique<SieveEvictor>();
    case EvictorKind::s3fifo:
      return std::make_unique<S3FifoEvictor>();
    case EvictorKind::twoq:
      return std::make_unique<TwoQEvictor>();
  }
  return std::make_unique<AdaptiveEvictor>();
}

}  // namespace vmem::policy
