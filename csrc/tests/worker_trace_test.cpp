// The ring of spans under several writers and a reader at once, and what the worker writes to it.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <set>
#include <thread>

#include "hytrain/span_ring.h"
#include "worker_bench.h"

namespace {

using hytrain::AdamHyper;
using hytrain::Pass;
using hytrain::Span;
using hytrain::SpanKind;
using hytrain::SpanRing;
using hytrain::testing::BenchLayer;
using hytrain::testing::check;
using hytrain::testing::kOneThreadPasses;
using hytrain::testing::Shape;
using hytrain::testing::WorkerBench;

// A span all of whose fields follow from one number: a mixture of two of them is seen.
Span span_of(std::int32_t writer, std::int32_t number) {
    Span span;
    span.kind = static_cast<SpanKind>(number % 9);
    span.thread = static_cast<std::uint16_t>(writer);
    span.layer = number;
    span.chunk = number + 1;
    span.step = -number;
    span.begin_ns = std::int64_t{number} << 32U | writer;
    span.end_ns = span.begin_ns + 1;
    span.bytes = span.begin_ns + 2;
    span.elements = -span.begin_ns;
    span.slot = number + 2;
    return span;
}

bool same(const Span& a, const Span& b) {
    return a.kind == b.kind && a.thread == b.thread && a.layer == b.layer && a.chunk == b.chunk &&
           a.step == b.step && a.begin_ns == b.begin_ns && a.end_ns == b.end_ns &&
           a.bytes == b.bytes && a.elements == b.elements && a.slot == b.slot;
}

void writers_and_a_reader(std::size_t capacity, int writers, std::int32_t each) {
    SpanRing ring(capacity);
    std::atomic<int> running{writers};
    std::vector<std::thread> threads;
    for (int writer = 0; writer < writers; ++writer) {
        threads.emplace_back([&ring, &running, writer, each] {
            for (std::int32_t i = 0; i < each; ++i) ring.write(span_of(writer, i));
            --running;
        });
    }
    std::vector<Span> found;
    std::uint64_t lost = 0;
    while (running != 0) lost += ring.take(found);
    for (std::thread& thread : threads) thread.join();
    lost += ring.take(found, true);
    std::vector<std::int32_t> last(static_cast<std::size_t>(writers), -1);
    for (const Span& span : found) {
        check(same(span, span_of(span.thread, span.layer)), "a span is a mixture of two");
        std::int32_t& before = last[span.thread];
        check(span.layer > before, "a writer's spans are out of order, or come twice");
        before = span.layer;
    }
    const auto written = static_cast<std::uint64_t>(writers) * static_cast<std::uint64_t>(each);
    check(found.size() + lost == written, "found and lost are not what was written");
    check(!found.empty(), "nothing was found");
}

void a_full_ring_keeps_the_newest() {
    SpanRing ring(8);
    for (std::int32_t i = 0; i < 21; ++i) ring.write(span_of(0, i));
    std::vector<Span> found;
    check(ring.take(found) == 13, "thirteen of 21 do not fit into 8");
    check(found.size() == 8 && found.front().layer == 13 && found.back().layer == 20,
          "what is left is not the newest");
    found.clear();
    check(ring.take(found) == 0 && found.empty(), "what was taken came again");
    bool refused = false;
    try {
        SpanRing wrong(12);
    } catch (const std::invalid_argument&) {
        refused = true;
    }
    check(refused, "12 is no power of two");
}

class Traced {
   public:
    explicit Traced(int num_threads, std::size_t n = 200, std::size_t chunk = 64,
                    unsigned max_delay_us = 0)
        : bench_(hytrain::make_host_device(1, max_delay_us), shapes(n, chunk), num_threads, 0, 0,
                 2) {}

    // Steps as a training makes them; `number` is what the trace calls the step.
    void step(std::int32_t number, float scale) {
        bench_.worker().set_trace_step(number);
        bench_.worker().begin_step(1e30);
        hyper_.step = number;
        for (BenchLayer& layer : bench_.layers()) {
            bench_.make_gradient(layer);
            bench_.send(layer, bench_.record(1.0F, hyper_), false);
        }
        bench_.worker().wait_all();
        bench_.worker().finalize(bench_.record(scale, hyper_));
        for (BenchLayer& layer : bench_.layers()) {
            bench_.worker().wait_complete(layer.index);
            layer.make_expected_step(scale, hyper_);
            bench_.check_weights(layer);
        }
    }

    std::vector<Span> take() {
        bench_.worker().wait_traced();
        // For what nothing waits for: it would note more although no trace is on.
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        std::vector<Span> spans;
        check(bench_.worker().take_trace(spans) == 0, "spans were lost");
        return spans;
    }

    WorkerBench& bench() { return bench_; }

   private:
    static std::vector<Shape> shapes(std::size_t n, std::size_t chunk) {
        std::vector<Shape> shapes(2);
        for (Shape& shape : shapes) {
            shape.n = n;
            shape.chunk = chunk;
        }
        return shapes;
    }
    WorkerBench bench_;
    AdamHyper hyper_{1e-2, 0.9, 0.999, 1e-8, 0.1, 1, true, true};
};

std::vector<Span> of_kind(const std::vector<Span>& spans, SpanKind kind) {
    std::vector<Span> found;
    for (const Span& span : spans) {
        if (span.kind == kind) found.push_back(span);
    }
    return found;
}

void the_worker_traces_passes_and_copies() {
    Traced traced(1);
    traced.step(1, 1.0F);
    check(traced.take().empty(), "there were spans without a trace");
    const auto start = std::chrono::steady_clock::now().time_since_epoch();
    traced.bench().worker().start_trace(1024, false);
    traced.step(2, 0.5F);  // another scale: previewed once more
    traced.bench().worker().wait_traced();
    traced.bench().worker().stop_trace();
    traced.step(3, 1.0F);
    std::vector<Span> spans = traced.take();
    // A copy is noted when its buffer is used again: some from before the trace are among them.
    const auto is_old = [start](const Span& span) {
        return std::chrono::nanoseconds(span.end_ns) < start;
    };
    spans.erase(std::remove_if(spans.begin(), spans.end(), is_old), spans.end());
    std::set<std::int32_t> slots;
    for (const Span& copy : of_kind(spans, SpanKind::kGradientToHost)) slots.insert(copy.slot);
    check(slots.size() == 8 && *slots.begin() >= 0, "two gradients that are kept share a slot");
    // Two layers of 64 + 64 + 64 + 8 elements, gradients and weights in 2 bytes each.
    const std::vector<Span> updates = of_kind(spans, SpanKind::kCommitThenPreview);
    check(updates.size() == 8, "not each chunk has its update");
    check(of_kind(spans, SpanKind::kPreview).size() == 8, "not each chunk was previewed again");
    check(of_kind(spans, SpanKind::kGradientToHost).size() == 8, "not each gradient was fetched");
    check(of_kind(spans, SpanKind::kWeightsToDevice).size() == 16, "weights were sent twice");
    check(spans.size() == 40, "there are other spans");
    std::set<std::pair<int, int>> places;
    for (const Span& span : spans) {
        check(span.step == 2, "a span of another step");
        check(span.begin_ns > 0 && span.end_ns >= span.begin_ns, "a span ends before it begins");
        check(span.end_ns - span.begin_ns < 10'000'000'000, "a span is not on one clock");
    }
    for (const Span& update : updates) {
        check(places.emplace(update.layer, update.chunk).second, "a chunk twice");
        const std::int64_t elements = update.chunk == 3 ? 8 : 64;
        check(update.elements == elements && update.bytes == 30 * elements, "another size");
        for (const Span& copy : of_kind(spans, SpanKind::kGradientToHost)) {
            const bool is_its = copy.layer == update.layer && copy.chunk == update.chunk;
            check(!is_its || copy.bytes == 2 * elements, "another number of bytes");
            check(!is_its || copy.end_ns <= update.begin_ns, "updated before it was there");
        }
    }
}

// With copies that take their time: all that a step has queued is in the trace, at once.
void a_trace_is_whole_when_it_was_waited_for() {
    Traced traced(1, 200, 64, 3000);
    traced.step(1, 1.0F);
    for (std::int32_t number = 2; number < 5; ++number) {
        traced.bench().worker().start_trace(1024, false);
        traced.step(number, 0.5F);
        traced.bench().worker().wait_traced();
        traced.bench().worker().stop_trace();
        std::vector<Span> spans;
        check(traced.bench().worker().take_trace(spans) == 0, "spans were lost");
        const auto is_earlier = [number](const Span& span) { return span.step < number; };
        spans.erase(std::remove_if(spans.begin(), spans.end(), is_earlier), spans.end());
        check(of_kind(spans, SpanKind::kWeightsToDevice).size() == 16, "a copy back is missing");
        check(spans.size() == 40, "a span is missing");
    }
    traced.bench().worker().wait_traced();  // and of no trace it waits for nothing
}

void each_thread_has_its_spans() {
    if (kOneThreadPasses) return;
    Traced traced(2, 200'000, 100'000);
    traced.bench().worker().start_trace(1024, true);
    traced.step(1, 1.0F);
    std::vector<Span> previews = of_kind(traced.take(), SpanKind::kPreview);
    check(previews.size() > 4 && previews.size() <= 8, "not a span for each of two threads");
    bool has_second = false;
    for (const Span& span : previews) has_second = has_second || span.thread == 1;
    check(has_second, "the second thread has none");
}

}  // namespace

int main() {
    a_full_ring_keeps_the_newest();
    writers_and_a_reader(4, 3, 20'000);  // overwritten all the time
    writers_and_a_reader(64, 4, 20'000);
    writers_and_a_reader(1U << 17U, 4, 20'000);  // never
    the_worker_traces_passes_and_copies();
    a_trace_is_whole_when_it_was_waited_for();
    each_thread_has_its_spans();
    std::printf("worker_trace_test: ok\n");
    return 0;
}
