// Commit and preview at once; included by adam_kernel.inl.
//
// A unit goes through eight stages, each of which waits for the one before it: moments, square
// roots, divisions and weights of the commit; then the same of the preview. Within a unit there is
// nothing to do while the divider works, and a CPU looks ahead by less than two units, so a unit's
// preview is interleaved with the next unit's commit.

// The input of the preview of a unit's weights: its moments, and the committed weights.
template <class M>
struct Pending {
    Reg m[M::kVectors], v[M::kVectors], p[M::kVectors];
};

template <class M>
HYTRAIN_INLINE void roots(const Reg* v, Reg* root) {
    for (std::size_t j = 0; j < M::kVectors; ++j) {
        root[j] = Vec::sqrt(v[j]);
    }
}
template <class M>
HYTRAIN_INLINE void quotients(const Reg* m, const Reg* root, const Constants& c, Reg* quotient) {
    for (std::size_t j = 0; j < M::kVectors; ++j) {
        quotient[j] = Vec::div(m[j], denominator(root[j], c));
    }
}
template <class M, class W>
HYTRAIN_INLINE void store_preview(const Pending<M>& u, const Reg* quotient, const Constants& c,
                                  void* w, std::size_t i) {
    Reg new_p[M::kVectors];
    for (std::size_t j = 0; j < M::kVectors; ++j) {
        new_p[j] = moved_by(u.p[j], quotient[j], c);
    }
    W::template store<M::kVectors>(w, i, new_p);
}

// Commits the unit at i, and writes the preview of the one before it, which is pending, if there
// is one; leaves the one at i pending.
template <class G, class W, class M, bool kHasPending>
HYTRAIN_INLINE void both_unit(float* p, const MomentRange& r, const void* before, const void* now,
                              void* w, std::size_t i, const Constants& c_before,
                              const Constants& c_now, Pending<M>& pending, std::size_t ahead) {
    constexpr std::size_t kVectors = M::kVectors;
    Reg root[kVectors], quotient[kVectors], pending_root[kVectors], pending_quotient[kVectors];
    if constexpr (kHasPending) {
        roots<M>(pending.v, pending_root);
    }
    prefetch_run<sizeof(float), M::kUnit>(p, i + ahead);
    const typename WholeWeights<NoOut>::template Unit<kVectors> old_p({p, nullptr}, i);
    Moved<G, M> u(old_p, r, before, i, c_before);
    prefetch_run<G::kBytes, M::kUnit>(before, i + ahead);
    if constexpr (kHasPending) {
        quotients<M>(pending.m, pending_root, c_now, pending_quotient);
    }
    roots<M>(u.v, root);
    prefetch_run<M::kBytes, M::kUnit>(r.m, i + ahead);
    u.begin(r, i);
    if constexpr (kHasPending) {
        store_preview<M, W>(pending, pending_quotient, c_now, w, i - M::kUnit);
    }
    prefetch_run<M::kBytes, M::kUnit>(r.v, i + ahead);
    quotients<M>(u.m, root, c_before, quotient);
    for_each_group<M>([&](std::size_t first, auto byte)
                          HYTRAIN_INLINE_BODY { u.template put<byte>(r, i, first); });
    u.store.finish(r, i);
    prefetch_run<G::kBytes, M::kUnit>(now, i + ahead);
    // The current step has no L2 decay: its moments do not depend on the new weights.
    for (std::size_t j = 0; j < kVectors; ++j) {
        const Reg g = G::load(now, i + j * kLanes);
        const NewMoments moved = step_moments<false>({Reg(), u.m[j], u.v[j]}, g, c_now);
        pending.m[j] = moved.m;
        pending.v[j] = moved.v;
    }
    for (std::size_t j = 0; j < kVectors; ++j) {
        const std::size_t at = i + j * kLanes;
        pending.p[j] = moved_by(Vec::load_f32(p + at), quotient[j], c_before);
        Vec::template store_f32<false>(p + at, pending.p[j]);
    }
}

// Writes the preview of the last unit, at i.
template <class W, class M>
HYTRAIN_INLINE void last_preview(const Pending<M>& pending, void* w, std::size_t i,
                                 const Constants& c_now) {
    Reg root[M::kVectors], quotient[M::kVectors];
    roots<M>(pending.v, root);
    quotients<M>(pending.m, root, c_now, quotient);
    store_preview<M, W>(pending, quotient, c_now, w, i);
}

template <class G, class W, class M>
void both_loop(float* p, const MomentRange r, std::size_t n, const GradientRange& previous,
               const GradientRange& current, void* w, std::size_t ahead) {
    constexpr std::size_t kUnit = M::kUnit;
    const Constants c_before(previous.constants);
    const Constants c_now(current.constants);
    const void* before = previous.data;
    const void* now = current.data;
    std::size_t i = 0;
    if (kUnit <= n) {
        Pending<M> pending;
        both_unit<G, W, M, false>(p, r, before, now, w, 0, c_before, c_now, pending, ahead);
        for (i = kUnit; i + kUnit <= n; i += kUnit) {
            both_unit<G, W, M, true>(p, r, before, now, w, i, c_before, c_now, pending, ahead);
        }
        last_preview<W, M>(pending, w, i - kUnit, c_now);
    }
    if (i < n) {
        const std::size_t count = n - i;
        Padded<kUnit> tail_p(p, i, count, sizeof(float));
        PaddedMoments<M> tail(r, i, count);
        const Padded<kUnit> tail_before(previous.data, i, count, G::kBytes);
        const Padded<kUnit> tail_now(current.data, i, count, G::kBytes);
        Padded<kUnit> tail_w;
        both_loop<G, typename W::Cached, M>(
            tail_p.data, tail.range, kUnit, {tail_before.data, previous.dtype, previous.constants},
            {tail_now.data, current.dtype, current.constants}, tail_w.data, 0);
        tail_p.write(p, i, count, sizeof(float));
        tail.write(r, i, count);
        tail_w.write(w, i, count, W::kBytes);
    }
}

inline const void* advance(const void* data, std::size_t elements, DType dtype) {
    return static_cast<const char*>(data) + elements * element_bytes(dtype);
}

// Two gradients of different types, or L2 decay: the two passes in turn over pieces that stay in
// the cache. Not worth the instances that fused loops would take; the numbers are the same.
void both_in_turn(float* p, const MomentRange& r, std::size_t n, const GradientRange& previous,
                  const GradientRange& current, const OutRange& out) {
    constexpr std::size_t kPiece = 1024;
    const std::size_t moment_size = r.kind == MomentKind::kFloat32    ? Fp32Moments::kBytes
                                    : r.kind == MomentKind::kBFloat16 ? Bf16Moments::kBytes
                                                                      : EightBitMoments::kBytes;
    for (std::size_t i = 0; i < n; i += kPiece) {
        const std::size_t count = n - i < kPiece ? n - i : kPiece;
        MomentRange moments = r;
        moments.m += i * moment_size;
        moments.v += i * moment_size;
        moments.first_index += static_cast<std::uint32_t>(i);
        if (r.kind == MomentKind::kEightBit) {
            moments.m_exponents += i / kMomentBlock;
            moments.v_exponents += i / kMomentBlock;
        }
        const GradientRange before{advance(previous.data, i, previous.dtype), previous.dtype,
                                   previous.constants};
        const GradientRange now{advance(current.data, i, current.dtype), current.dtype,
                                current.constants};
        const OutRange piece{static_cast<char*>(out.data) + i * element_bytes(out.dtype), out.dtype,
                             out.non_temporal};
        commit(p + i, moments, count, before, OutRange{nullptr, out.dtype, false}, 0);
        preview(p + i, moments, count, now, piece, 0);
    }
}

void commit_then_preview(float* p, const MomentRange& moments, std::size_t n,
                         const GradientRange& previous, const GradientRange& current,
                         const OutRange& out, std::size_t ahead) {
    if (previous.dtype != current.dtype || current.constants.l2 != 0.0F) {
        return both_in_turn(p, moments, n, previous, current, out);
    }
    with_moments(moments.kind, [&](auto kind) {
        with_in(current.dtype, [&](auto in) {
            with_out(out, [&](auto to) {
                both_loop<decltype(in), decltype(to), decltype(kind)>(p, moments, n, previous,
                                                                      current, out.data, ahead);
            });
        });
    });
}
