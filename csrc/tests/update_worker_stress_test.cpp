// The update worker in random lives, for the sanitizers to watch: whatever a training does to it,
// from as many threads, with random delays at every hand-off, and bit for bit what a serial loop
// makes of the same steps.
//
//   update_worker_stress_test [RUNS [FIRST_SEED]]
//
// A run is a life drawn from its seed, which a failure names. HYTRAIN_DELAYS=SEED:MAX_US, as in
// training, sets the longest delay of all runs; otherwise each draws its own.
#include <atomic>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <thread>

#include "worker_bench.h"

namespace {

using hytrain::AdamHyper;
using hytrain::DType;
using hytrain::EventHandle;
using hytrain::Lane;
using hytrain::Pass;
using hytrain::StepRecord;
using hytrain::UpdateWorker;
using hytrain::WorkerError;
using hytrain::testing::BenchLayer;
using hytrain::testing::check;
using hytrain::testing::kOneThreadPasses;
using hytrain::testing::random_gradient;
using hytrain::testing::Shape;
using hytrain::testing::State;
using hytrain::testing::WorkerBench;

constexpr int kSteps = 12;
constexpr std::size_t kTeamElements = 16384 + 130;  // more than a pass does on one thread
constexpr char kJunk = 0x7F;                        // large numbers, or none, in every dtype

class Life {
   public:
    Life(std::uint64_t seed, unsigned max_delay_us)
        : random_(seed * 977 + 5),
          is_direct_(chance(0.25)),
          is_split_(chance(0.5)),
          bench_(hytrain::make_host_device(seed, max_delay_us), shapes(), draw({1, 2}), seed,
                 max_delay_us, 1 + random_() % 3),
          junk_(3 * kTeamElements * sizeof(float), kJunk) {}

    // Some lives end in the middle of a step, as trainings do.
    void live() {
        std::atomic<bool> stop{false};
        std::thread observer([&] { observe(stop); });
        const int last = chance(0.2) ? draw({2, 5, 8}) : kSteps;
        for (int step = 0; step < kSteps; ++step) {
            if (step == last) {
                start_step();
                break;
            }
            make_step();
        }
        if (last == kSteps) flush();
        stop = true;
        observer.join();
        bench_.worker().close();
    }

   private:
    bool chance(double probability) {
        return std::uniform_real_distribution<double>(0.0, 1.0)(random_) < probability;
    }
    template <class Value>
    Value draw(std::initializer_list<Value> values) {
        return values.begin()[random_() % values.size()];
    }
    UpdateWorker& worker() { return bench_.worker(); }

    std::vector<Shape> shapes() {
        std::vector<Shape> shapes(3 + random_() % 3);
        for (Shape& shape : shapes) {
            shape.chunk = draw<std::size_t>({33, 64, 96});
            shape.n = 1 + random_() % (4 * shape.chunk);
            shape.gradient = draw({DType::kFloat32, DType::kBFloat16, DType::kFloat16});
            shape.weights = draw({DType::kFloat32, DType::kBFloat16});
            shape.split = is_split_;
            shape.whole_on_host = is_split_ && chance(0.5);
            if (is_split_) shape.weights = DType::kBFloat16;
            shape.weights_on_host = chance(0.2);
        }
        if (!kOneThreadPasses && chance(0.25)) shapes[0].chunk = shapes[0].n = kTeamElements;
        return shapes;
    }

    // Who reads the worker's state and statistics beside everything else.
    void observe(const std::atomic<bool>& stop) {
        std::size_t looks = 0;
        while (!stop) {
            const int layer = static_cast<int>(looks % bench_.layers().size());
            worker().is_fetched(layer);
            worker().has_pending(layer);
            worker().is_moving(layer);
            worker().check_error();
            jobs_seen_ += worker().take_statistics().jobs;
            if (looks % 7 == 0) worker().take_spans();
            if (looks % 5 == 0) {
                std::vector<hytrain::Span> spans;
                worker().take_trace(spans);
            }
            ++looks;
            std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
    }

    // -- a step ----------------------------------------------------------------------------------

    void make_step() {
        worker().set_trace_step(static_cast<std::int32_t>(steps_made_));
        if (chance(0.3)) worker().start_trace(16, chance(0.5));
        if (chance(0.3)) worker().stop_trace();
        move_some();
        start_step();
        withdraw_some();
        const bool is_made = is_direct_ || chance(0.75);
        is_made ? finish_step() : skip_step();
        if (!is_direct_ && chance(0.5)) move_some();  // before anybody has waited for the weights
        forward();
        release_moved();
        if (chance(0.2)) flush();
        if (chance(0.1)) publish();
        if (chance(0.1)) {
            const Shape& shape = bench_.layer(0).shape;
            bench_.add_slots(0, shape.chunk * hytrain::size_of(shape.gradient), 2);
        }
    }

    // Backward, in a thread of its own as autograd's is.
    void start_step() {
        worker().begin_step(draw({0.0, 30.0, 1000.0, std::numeric_limits<double>::infinity()}));
        hyper_.step = steps_made_ + 1;
        hyper_.lr = 1e-2;
        std::thread backward([this] {
            for (auto layer = bench_.layers().rbegin(); layer != bench_.layers().rend(); ++layer) {
                bench_.make_gradient(*layer);
                if (!layer->away) send(*layer);
                release_fetched();
            }
        });
        backward.join();
    }

    void send(BenchLayer& layer) { bench_.send(layer, bench_.record(1.0F, hyper_), is_direct_); }

    // A gradient that has left the device: its memory is somebody else's at once.
    void release_fetched() {
        for (BenchLayer& layer : bench_.layers()) {
            // One that came back from the device may never have been fetched from it.
            const bool is_made = bench_.device().is_complete(layer.ready);
            if (!layer.away && is_made && worker().is_fetched(layer.index)) {
                std::fill(layer.gradient.begin(), layer.gradient.end(), kJunk);
            }
        }
    }

    void withdraw_some() {
        if (is_direct_ || !chance(0.4)) return;
        for (BenchLayer& layer : bench_.layers()) {
            if (layer.away || !chance(0.5)) continue;
            withdraw(layer);
            bench_.device().record(layer.ready, Lane::kToDevice);
            send(layer);
        }
    }

    // The gradient comes back, and the weights are those of the last step.
    void withdraw(BenchLayer& layer) {
        if (worker().cancel_update(layer.index)) {
            worker().wait_complete(layer.index);
        } else {
            std::vector<char> returned(layer.gradient.size());
            // Somebody still writes where the gradient is to come.
            bench_.device().copy(Lane::kToHost, returned.data(), junk_.data(), returned.size());
            bench_.device().record(layer.free, Lane::kToHost);
            hytrain::Job job;
            job.pass = Pass::kWithdraw;
            job.layer = layer.index;
            job.withdraw_to = returned.data();
            job.gradient_ready = layer.free;
            worker().submit(std::move(job));
            worker().wait_complete(layer.index);
            layer.gradient.swap(returned);
        }
        check(layer.gradient == layer.sent, layer.name() + ": another gradient came back");
        bench_.check_weights(layer);
    }

    void finish_step() {
        float scale = 1.0F;
        if (!is_direct_) {
            // As the pipeline does: layers on the device have arrived there before the outcome.
            for (BenchLayer& layer : bench_.layers()) {
                if (layer.away) wait_left(layer);
            }
            scale = draw({1.0F, 1.0F, 0.37F});
            hyper_.lr = draw({1e-2, 1e-2, 5e-3});
            worker().finalize(bench_.record(scale, hyper_));
        }
        for (BenchLayer& layer : bench_.layers()) {
            if (layer.away) update_on_device(layer, scale);
            layer.make_expected_step(scale, hyper_);
        }
        ++steps_made_;
    }

    void update_on_device(BenchLayer& layer, float scale) {
        wait_left(layer);
        State& state = *layer.state;
        const hytrain::GradientStep step{layer.sent.data(), layer.shape.gradient, scale, hyper_};
        const hytrain::Outgoing out{layer.weights.data(), layer.shape.weights, false};
        // The copy of weights that the worker has sent may still be under way.
        worker().wait_complete(layer.index);
        if (state.split) {
            const hytrain::SplitWeights weights{out.data, state.remainders.data()};
            hytrain::adam_commit(weights, hytrain::fp32_moments(state.m.data(), state.v.data()),
                                 layer.shape.n, step, 1);
            return;
        }
        hytrain::adam_commit(state.p.data(), state.m.data(), state.v.data(), layer.shape.n, step,
                             out, 1);
    }

    void skip_step() {
        for (BenchLayer& layer : bench_.layers()) {
            if (!layer.away && !worker().cancel_update(layer.index)) {
                bench_.submit(layer, Pass::kDrop);
            }
        }
    }

    // The next forward: several readers, each in an order of its own.
    void forward() {
        const auto read = [this](bool upwards) {
            const int count = static_cast<int>(bench_.layers().size());
            for (int i = 0; i < count; ++i) {
                const BenchLayer& layer = bench_.layer(upwards ? i : count - 1 - i);
                worker().wait_issued(layer.index);
                worker().wait_complete(layer.index);
                bench_.check_weights(layer);
            }
        };
        std::thread other([&] { read(false); });
        read(true);
        other.join();
    }

    void publish() {
        for (BenchLayer& layer : bench_.layers()) {
            if (layer.away) continue;
            // What is pending is not in the state that is published.
            commit(layer);
            bench_.submit(layer, Pass::kPublish);
        }
        forward();
    }

    void commit(BenchLayer& layer) {
        if (worker().has_pending(layer.index)) bench_.submit(layer, Pass::kCommit);
    }

    void flush() {
        worker().wait_all();
        for (BenchLayer& layer : bench_.layers()) {
            if (!layer.away) commit(layer);
        }
        worker().wait_all();
        for (BenchLayer& layer : bench_.layers()) {
            wait_left(layer);
            check(!worker().has_pending(layer.index), layer.name() + ": something is pending");
            bench_.check_state(layer);
        }
        release_moved();
    }

    // -- moves -----------------------------------------------------------------------------------

    void move_some() {
        if (!chance(0.6)) return;
        for (BenchLayer& layer : bench_.layers()) {
            if (!chance(0.4)) continue;
            move(layer);
            if (chance(0.3)) worker().wait_moved(layer.index);
            if (chance(0.2)) move(layer);  // and back at once
            release_moved();
        }
    }

    void move(BenchLayer& layer) {
        // One place of each kind a layer: as in training, a move waits for the one before.
        wait_left(layer);
        std::unique_ptr<State>& kept = left_[layer.index];
        const EventHandle moved = chance(0.5) ? layer.moved : hytrain::kNoEvent;
        kept = bench_.move(layer, moved);
    }

    // Until a layer's state is where it goes, and the place that it has left is not used any more.
    void wait_left(BenchLayer& layer) {
        worker().wait_moved(layer.index);
        bench_.wait(layer.moved);
        release(layer.index);
    }

    void release_moved() {
        for (BenchLayer& layer : bench_.layers()) {
            if (!worker().is_moving(layer.index)) release(layer.index);
        }
    }

    // State that has left its place is overwritten, as the allocator's next user would.
    void release(int layer) {
        const auto found = left_.find(layer);
        if (found == left_.end() || found->second == nullptr) return;
        std::memset(found->second->weights(), kJunk, found->second->weight_bytes());
        std::memset(found->second->v.data(), kJunk, found->second->v.size() * sizeof(float));
        left_.erase(found);
    }

    std::mt19937_64 random_;
    bool is_direct_;  // every update is committed at once
    bool is_split_;   // master weights are
    std::map<int, std::unique_ptr<State>> left_;
    WorkerBench bench_;
    std::vector<char> junk_;
    AdamHyper hyper_{1e-2, 0.9, 0.999, 1e-8, 0.1, 1, true, true};
    std::int64_t steps_made_ = 0;
    std::int64_t jobs_seen_ = 0;
};

// The longest delay of HYTRAIN_DELAYS, or -1 where it is not set.
int wanted_delay() {
    const char* text = std::getenv("HYTRAIN_DELAYS");
    const char* limit = text == nullptr ? nullptr : std::strchr(text, ':');
    return limit == nullptr ? -1 : std::atoi(limit + 1);
}

}  // namespace

int main(int argc, char** argv) {
    const char* wanted = std::getenv("HYTRAIN_STRESS_RUNS");
    const int runs = argc > 1 ? std::atoi(argv[1]) : (wanted != nullptr ? std::atoi(wanted) : 40);
    const int first = argc > 2 ? std::atoi(argv[2]) : 0;
    check(runs > 0, "the number of runs must be positive");
    constexpr int kDelays[] = {0, 30, 200};
    for (int seed = first; seed < first + runs; ++seed) {
        const int delay = wanted_delay() >= 0 ? wanted_delay() : kDelays[seed % 3];
        // A race's or a check's report comes behind the life that it was in.
        std::fprintf(stderr, "seed %d, delays of up to %d us\n", seed, delay);
        Life(static_cast<std::uint64_t>(seed), static_cast<unsigned>(delay)).live();
    }
    std::printf("update_worker_stress_test: %d lives\n", runs);
    return 0;
}
